"""Start a script on several processes, as torchrun does, but fork them from one that has done the slow imports.

python fork_ranks.py PROCESSES SCRIPT ARGUMENT...

The imports at the top of the script are done here first, once for all processes.
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
    """Call `prepare` and run the script in a new process; return its number."""
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


def import_modules_of(script: str) -> None:
    statements = ast.parse(Path(script).read_text()).body
    imports = [statement for statement in statements if isinstance(statement, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module([*imports], type_ignores=[]), script, "exec"), {})


def set_rank(rank: int, processes: int, port: int) -> None:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    # The parent process has the store; it sends the port through a pipe when the store is ready.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.read(port, 8).decode(), TORCHELASTIC_USE_AGENT_STORE="True")


def main() -> int:
    processes = int(sys.argv[1])
    sys.argv = sys.argv[2:]
    import_modules_of(sys.argv[0])
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    running: dict[int, int] = {}  # process to the pipe that its port is sent through

    def end(*_: int | FrameType | None) -> None:
        for process in running:
            os.kill(process, signal.SIGTERM)
        os._exit(1)

    for rank in range(processes):
        reading, writing = os.pipe()
        running[run_in_a_fork(sys.argv[0], partial(set_rank, rank, processes, reading))] = writing
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
