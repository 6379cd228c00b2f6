"""One kinship node for benchmarks, with the output of mesh_agent.py. Runs in a Python that has kinship."""

import asyncio
import signal
import sys

import kinship

WORDS = {
    "MemberJoined": "joined",
    "MemberRecovered": "joined",
    "MemberDead": "dead",
    "MemberLeft": "left",
    "MemberSuspect": "suspect",
}


async def main() -> None:
    name, key, host, port, *seeds = sys.argv[1:]
    config = kinship.Config.lan(name=name, bind=f"{host}:{port}", keys=[key], seeds=seeds, cluster="bench")
    gone = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, gone.set)
    cluster = kinship.Cluster(config)
    await cluster.start()
    print("up", flush=True)
    for member in cluster.members():
        if member.name != name:
            print(f"joined {member.name}", flush=True)
    telling = asyncio.create_task(tell(cluster, name))
    await gone.wait()
    await cluster.leave()
    telling.cancel()


async def tell(cluster: kinship.Cluster, name: str) -> None:
    async for event in cluster.events():
        word = WORDS.get(type(event).__name__)
        if word is not None and event.member.name != name:
            print(f"{word} {event.member.name}", flush=True)


asyncio.run(main())
