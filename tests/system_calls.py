"""The system calls of a program that concern files below a directory, in order, as strace(1) records them."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRACED = "openat,write,pwrite64,fsync,fdatasync,syncfs,rename,renameat,renameat2,link,linkat,unlink,unlinkat"
_SYNC = re.compile(r"(?:fsync|fdatasync|syncfs)\(\d+<([^>]+)>")
_WRITE = re.compile(r"(?:write|pwrite64)\(\d+<([^>]+)>")
_NAMES = re.compile(r'"([^"]+)"')


def system_calls(code: str, directory: Path, *arguments: str) -> list[str]:
    """Run Python code with this directory as its first argument; return what it did there: `sync NAME`, `rename OLD NEW` ...

    Names are relative to the directory, which is `.` itself.
    """
    record = directory.with_name(f"{directory.name}.calls")
    command = ["strace", "-f", "-y", "-qq", "-o", record, "-e", f"trace={TRACED}"]
    command += [sys.executable, "-c", code, directory, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = []
    for line in record.read_text().splitlines():
        call = line.split(maxsplit=1)[1]
        if "= -1 " in call:
            continue
        name = call.partition("(")[0]
        if synced := _SYNC.match(call):
            found.append(("sync", [synced[1]]))
        elif written := _WRITE.match(call):
            found.append(("write", [written[1]]))
        elif name.startswith(("rename", "link", "unlink")):
            found.append((name[:6].removesuffix("at"), _NAMES.findall(call)))
    return [
        " ".join([what, *(str(Path(path).relative_to(directory)) for path in paths)])
        for what, paths in found
        if all(Path(path).is_relative_to(directory) for path in paths)
    ]
