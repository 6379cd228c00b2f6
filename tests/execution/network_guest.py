"""A guest that has the network of a proxy alone, on any engine: what it reaches, and what it does not."""

import asyncio
import shutil
from pathlib import Path

from mesh.network.proxy import Proxy
from mesh.network.proxy_rules import ProxyRules
from tests.execution.bench import WAIT_S, Bench
from tests.tls_site import HOST, site

CURL = Path(shutil.which("curl") or "curl")


async def loopback(host: str) -> list[str]:
    """Resolve the one name of these tests."""
    assert host == HOST
    return ["127.0.0.1"]


async def see_what_it_reaches(bench: Bench, image: str | None = None) -> None:
    """Start a guest whose first act is a request by TLS, and see that it reaches its host and nothing else."""
    async with site(bench.root / "work") as there:
        told = list[str]()
        proxy = Proxy(
            ProxyRules([there.where, "else.example.org:443"], 1 << 30, loopback), b"j" * 16, [there.where], told.append
        )
        ask = f"curl -sS --cacert $MESH_WORK_DIR/ca.pem --max-time {WAIT_S:g}"
        script = f"""
        {ask} https://{there.where}/ && echo " fetched"
        {ask} https://else.example.org/ || echo "else $?"
        {ask} --noproxy '*' https://{there.where}/ || echo "directly $?"
        {ask} --noproxy '*' http://127.0.0.1:{there.port}/ || echo "this machine $?"
        cat /proc/net/dev
        """
        said = await bench.output(script, proxy=proxy.listen, image=image)
        assert "hello fetched" in said, said
        refused = "else 56" in said or "else 7" in said  # by the version of curl
        assert refused and "response 403" in said, "the job did not ask for it"
        assert "directly 6" in said and "this machine 7" in said, "there is no other way, not even for names"
        assert [line.split(":")[0].strip() for line in said.splitlines() if ": " in line and "curl" not in line] == [
            "lo"
        ]
        await proxy.close()
        assert told[0] == f"connected to {there.where}" and told[-1].startswith(f"{there.where}: 1 connection")


async def see_that_it_goes_on(bench: Bench) -> None:
    """See that a guest that never uses its proxy is told of it, and not held up."""
    proxy = Proxy(ProxyRules([], 0, loopback), b"j" * 16, [], print)
    guest = await bench.shell("echo $HTTPS_PROXY $no_proxy; exit 3", proxy=proxy.listen)
    async with asyncio.timeout(WAIT_S):
        assert (await guest.wait()).code == 3
    assert bench.log == "http://127.0.0.1:3128 localhost,127.0.0.1,::1\n"
    await proxy.close()
