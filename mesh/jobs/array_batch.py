"""The command of a job: as it was submitted, or once for each index of its batch."""

from mesh.model.spec import JobSpec

SHELL = "/bin/sh"
# The first argument is the last index. A failed index does not keep the others from running; the last failure is the job's.
EACH_INDEX = """last=$1 code=0
shift
while [ "$MESH_ARRAY_INDEX" -le "$last" ]; do
  "$@" || { code=$?; echo "mesh: index $MESH_ARRAY_INDEX ended with exit code $code" >&2; }
  MESH_ARRAY_INDEX=$((MESH_ARRAY_INDEX + 1))
done
exit $code"""


def command_of(spec: JobSpec) -> tuple[str, ...]:
    """Return what the guest runs. A batch starts with `MESH_ARRAY_INDEX` at its first index, and needs a shell."""
    if spec.array is None or spec.array.batch == 1:
        return spec.argv
    return (SHELL, "-c", EACH_INDEX, "mesh", str(spec.array.last), *spec.argv)
