"""The exceptions that core-plugin raises for a user's mistake.

Each says what is wrong, where, and what to do, so that the command line can show the message
without a traceback. Everything else that is raised is a fault of a plugin or of core-plugin.
"""


class CorePluginError(Exception):
    """The root of all of them. ``exit_code`` is what the command line exits with."""

    exit_code = 1


class ConfigError(CorePluginError, ValueError):
    """A configuration is wrong; the message lists every fault with its file, line and path."""

    exit_code = 2

    @property
    def faults(self) -> tuple[str, ...]:
        """Each of them alone."""
        return self.args

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class PluginNotFoundError(CorePluginError, ValueError):
    """No registered or installed plugin of the type has the name."""

    exit_code = 2


class PluginConflictError(CorePluginError):
    """Two distributions claim one name in one type."""

    exit_code = 2


class PluginLoadError(CorePluginError):
    """Importing a plugin raised; the cause is chained."""


class PluginContractError(CorePluginError, TypeError):
    """An object is not what its plugin type asks for."""


class PluginIncompatibleError(CorePluginError):
    """A plugin's distribution asks for another version of core-plugin or torch."""


class PluginDisabledError(CorePluginError):
    """The allow or deny list forbids a plugin's distribution."""


class PluginUnavailableError(CorePluginError):
    """A plugin is installed but cannot run on this machine."""


class DeviceIndexError(CorePluginError, IndexError):
    """A device has fewer indices than the one that was asked for."""

    exit_code = 2


class TrainingError(CorePluginError):
    """A run that started cannot go on."""


class CheckpointError(CorePluginError):
    """A checkpoint cannot be written, or is not one that this run can continue from."""


class RankMismatchError(CorePluginError):
    """The ranks of a run do not agree on the configuration or on the code they run."""


class PlanError(CorePluginError):
    """A run does not fit the resources it asks for."""
