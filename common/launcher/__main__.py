"""``mmrouter up``, which the launch scripts call, too."""

import os
import shlex
import signal
import sys
import tempfile
from pathlib import Path

from common.cli.known_flags import check_vllm, version_line
from common.errors import ConfigurationError, MmRouterError
from common.launcher import demo
from common.launcher.fleet import STOPPED_BY, EndedError, Fleet, StoppedError, pause
from common.launcher.frontend_access import client_tls
from common.launcher.options import HELP, Plan, make_plan
from common.launcher.sweeper import Sessions, Sweeper

_SLACK_S = 15.0  # that processes may need beyond their time to drain


def main() -> None:
    """Serve until a signal, or until no worker or no frontend is left. Exit status: 2 for an
    impossible request, 1 if a process ended unexpectedly, else 128 plus the signal."""
    argv = sys.argv[1:]
    if {"-h", "--help", "--version"} & set(argv):
        print(version_line() if "--version" in argv else HELP)
        return
    try:
        check_vllm()
        client_tls()  # whether a certificate that is named can be used
        plan = make_plan(argv, os.environ)
        demo.make(plan.model)
        scratch = _scratch()
    except MmRouterError as error:
        sys.exit(_refused(str(error)))
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(_run(plan, scratch))


def _refused(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 2


def _scratch() -> Path:
    """Create a directory for temporary files, vLLM's sockets among them, removed at the end."""
    try:
        return Path(tempfile.mkdtemp(prefix="mmrouter.", dir=os.environ.get("TMPDIR")))
    except OSError:
        raise ConfigurationError(
            f"TMPDIR={os.environ.get('TMPDIR')} can't be written to: name a directory for "
            "temporary files"
        ) from None


def _run(plan: Plan, scratch: Path) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPED_BY)
    sweeper = Sweeper(Sessions(plan.drain_s + _SLACK_S, scratch))
    fleet = Fleet(plan, sweeper, scratch)
    if plan.workers:
        count = f"{len(plan.workers)} worker{'s' if plan.workers[1:] else ''}"
        print(f"{count} on {plan.devices}, {plan.model}")
    print(f"logs: {shlex.quote(str(plan.run_dir))}", flush=True)
    status, why = 0, ""
    try:
        fleet.start()
        print(f"\n{fleet.ready()}\n\nCtrl-C stops everything.", flush=True)
        fleet.watch()
    except EndedError as error:
        status, why = 1, f"error: {error}"
    except StoppedError as stopped:
        status = 128 + stopped.number
    finally:
        print(f"stopping {' '.join(fleet.names)}; Ctrl-C again kills", flush=True)
        _stop(fleet, sweeper)
    if why:
        print(why, file=sys.stderr)
    return status


def _stop(fleet: Fleet, sweeper: Sweeper) -> None:
    sweeper.stop()
    while not sweeper.ended():
        fleet.reap()
        try:
            pause(0.1)
        except StoppedError:
            sweeper.kill()


if __name__ == "__main__":
    main()
