"""Starts a script on several processes, as torchrun does, but forks them from one that has imported what takes seconds.

python fork_ranks.py PROCESSES SCRIPT ARGUMENT...

What the script imports at its top is imported here first, so that its processes find it done.
"""

import ast
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType


def run_in_a_fork(script: str, prepare: Callable[[], None] = lambda: None) -> int:
    """The number of a new process that runs the script, with what `prepare` does first."""
    if process := os.fork():
        return process
    code = 0
    try:
        prepare()
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def import_what_it_imports(script: str) -> None:
    statements = ast.parse(Path(script).read_text()).body
    imports = [statement for statement in statements if isinstance(statement, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module([*imports], type_ignores=[]), script, "exec"), {})


def take_place(rank: int, processes: int, port: int) -> None:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.environ.update({name: str(value) for name, value in places.items()})
    # The store is that of the process that forked: its port comes through a pipe once it is there.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.read(port, 8).decode(), TORCHELASTIC_USE_AGENT_STORE="True")


def main() -> int:
    processes = int(sys.argv[1])
    sys.argv = sys.argv[2:]
    import_what_it_imports(sys.argv[0])
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    running: dict[int, int] = {}  # and where each reads its port

    def end(*_: int | FrameType | None) -> None:
        for process in running:
            os.kill(process, signal.SIGTERM)
        os._exit(1)

    for rank in range(processes):
        reading, writing = os.pipe()
        running[run_in_a_fork(sys.argv[0], partial(take_place, rank, processes, reading))] = writing
    signal.signal(signal.SIGTERM, end)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # its thread starts after the forks
    for writing in running.values():
        os.write(writing, str(store.port).encode())
    while running:
        process, status = os.wait()
        del running[process]
        if status:
            end()  # the others would wait for it
    return 0


if __name__ == "__main__":
    sys.exit(main())
