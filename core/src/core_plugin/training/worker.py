"""One process of a run, as a launcher starts it."""

from __future__ import annotations

import signal
import sys
import traceback
from dataclasses import dataclass

from core_plugin.config import RunConfig
from core_plugin.errors import ConfigError, CorePluginError
from core_plugin.training.loop import Outcome, train
from core_plugin.training.stop import restore_default_handlers
from core_plugin.training.world import (
    Place,
    World,
    join,
    lost_contact,
    place_from_environment,
)
from core_plugin.types.launcher import INTERRUPTED


@dataclass(frozen=True)
class Worker:
    """Takes part in a run and returns an exit code. It can be pickled."""

    config: RunConfig
    debug: bool = False

    def __call__(self) -> int:
        """Run, and report what went wrong once, on the rank where it did."""
        try:
            restore_default_handlers()
            place = place_from_environment()
            _check_place(self.config, place)
            with join(place) as world:
                return self._run(world)
        except CorePluginError as error:
            return _report(str(error), error, self.debug)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a launcher may send it once more
            print("stopped before the first step; nothing is lost", file=sys.stderr)
            return INTERRUPTED

    def _run(self, world: World) -> int:
        try:
            outcome = train(self.config, world)
        except CorePluginError as error:
            if world.first_to_say(str(error)):
                _report(str(error), error, self.debug)
            return error.exit_code
        except SystemExit as error:  # by itself it would end the process as if all were well
            message = f"rank {world.rank}: something called sys.exit({error.code!r})"
            _report(f"{message}; raise an exception instead", error, True)
            return error.code if isinstance(error.code, int) and error.code else 1
        except Exception as error:
            if lost_contact(error):
                message = f"rank {world.rank} lost contact with another rank ({error})"
                return _report(message, error, self.debug)
            return _report(f"rank {world.rank}: {type(error).__name__}: {error}", error, True)
        if outcome is not Outcome.FINISHED and world.rank == 0:
            print(
                f"stopped; everything up to here is saved in "
                f"{self.config.checkpoint.directory}. Go on with --resume",
                file=sys.stderr,
            )
        return outcome.value


def _check_place(config: RunConfig, place: Place | None) -> None:
    """Check that an outer launcher made as many processes as the configuration says."""
    launcher = config["launcher"]
    asked = launcher.implementation.processes(launcher.params)
    if place is not None and asked > 1 and asked != place.local_world_size:
        raise ConfigError(
            launcher.origin.fault(
                f"the configuration asks for {asked} processes on a host, but the outer launcher "
                f"started {place.local_world_size}; make them equal, or leave the launcher out"
            )
        )


def _report(message: str, error: BaseException, with_traceback: bool) -> int:
    if with_traceback:
        traceback.print_exception(error)
    print(f"error: {message}", file=sys.stderr, flush=True)
    return getattr(error, "exit_code", 1)
