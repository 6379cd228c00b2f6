"""Run programs one after the other, each in a fork of this process, which has imported the frameworks.

Each line of the input is an order; the answer is the exit code. A program has the arguments, environment and directory of its
order, and `sys.path` of this one.
"""

import gc
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # as the programs set it

import lightning.pytorch  # noqa: F401
import transformers.models.bert.modeling_bert
import transformers.trainer  # noqa: F401

assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork would lack the other threads"
gc.freeze()  # a collection in a fork would copy what it shares
for line in sys.stdin:
    words, cwd, env, *files = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()

for number, file in enumerate(files, 1):
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
os.chdir(cwd)
os.environ.clear()
os.environ.update(env)
tempfile.tempdir = None  # it was read from the environment
if words[0] == "-c":
    exec(words[1], {"__name__": "__main__"})
else:
    sys.argv[:] = words
    runpy.run_path(words[0], run_name="__main__")
