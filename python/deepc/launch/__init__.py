"""Starts the ranks of a run, here and on other hosts, and ends all of them, whatever happens.

options.py   command line -> Launch, a frozen plan of what will be started
runner.py    Launch -> exit code: signals, the report of what failed first (failure.py)
driver.py    the launcher's side: one agent per host, here or through ssh; they talk in frames
mpi.py       instead: the command line of srun or mpirun
notebook.py  instead: ranks of functions, from a notebook
remote/      what only other hosts need: hostfile and filters (hosts.py), ssh.py, the environment that they get
host/        on every host: agent.py starts and watches the ranks; rank.py is the first code of every rank;
             reaper.py: no process outlives the run; store.py: their meeting point; bind.py: cores of a rank;
             places.py: which rank am I under srun or mpirun. Imports neither torch nor deepc."""

from .options import Launch, add_arguments, plan
from .runner import run

__all__ = ["Launch", "add_arguments", "plan", "run"]
