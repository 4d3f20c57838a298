"""One process of a run, as a launcher starts it."""

from __future__ import annotations

import signal
import sys
import traceback
from dataclasses import dataclass

from core_plugin.config import RunConfig
from core_plugin.errors import ConfigError, CorePluginError
from core_plugin.training import blame
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
            return self._report(str(error), error)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a launcher may send it once more
            print("stopped before the first step; nothing is lost", file=sys.stderr)
            return INTERRUPTED

    def _run(self, world: World) -> int:
        try:
            outcome = train(self.config, world)
        except CorePluginError as error:
            if world.first_to_say(str(error)):
                self._report(str(error), error, hint=isinstance(error.__cause__, blame.BugError))
            return error.exit_code
        except SystemExit as error:  # by itself it would end the process as if all were well
            message = f"something called sys.exit({error.code!r}) in {blame.where(error)}"
            self._report(f"rank {world.rank}: {message}; raise an exception instead", error)
            return error.code if isinstance(error.code, int) and error.code else 1
        except Exception as error:
            if lost_contact(error):
                return self._report(_lost_contact(world), error)
            # A fault of the set-up comes again at once; this one may not in days.
            return self._report(f"rank {world.rank}: {blame.told(error)}", error, shown=True)
        if outcome is not Outcome.FINISHED and world.rank == 0:
            print(
                f"stopped; everything up to here is saved in "
                f"{self.config.checkpoint.directory}. Go on with --resume",
                file=sys.stderr,
            )
        return outcome.value

    def _report(
        self, message: str, error: BaseException, *, hint: bool = False, shown: bool = False
    ) -> int:
        if self.debug or shown:
            traceback.print_exception(error)
        elif hint:
            message = f"{message}\n{blame.HINT}"
        print(f"error: {message}", file=sys.stderr, flush=True)
        return getattr(error, "exit_code", 1)


def _lost_contact(world: World) -> str:
    step = world.progress.step
    when = f"step {step}" if step else world.progress.phase
    return (
        f"rank {world.rank} lost contact with another rank ({when}), which has failed, or was "
        "killed or cut off. What that rank, its launcher or its host says of it is the cause; "
        "mend that, and go on with --resume"
    )


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
