"""A hostile web page in the owner's own browser: another site on this machine, so that the owner's cookies come along."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

# Every way in which a page can send a request without the user's help. Each answer is what the page can read of it.
TRIES = """
const victim = {victim!r}, forms = ["/lend/pause", "/lend/reclaim", "/leave"], pages = ["/", "/lend", "/jobs", "/stream/nodes"];
const read = async (path, options) => {{
  try {{
    const answer = await fetch(victim + path, {{credentials: "include", ...options}});
    return answer.type + ":" + (await answer.text());
  }} catch (error) {{ return "refused" }}
}};
const loads = (tag, path) => new Promise(told => {{
  const one = document.createElement(tag);
  one.onload = () => {{
    let text = "";
    try {{ text = one.contentDocument.body.textContent }} catch (error) {{}}
    told("loaded:" + text);
  }};
  one.onerror = () => told("refused");
  setTimeout(() => told("silent"), 3000);
  one[tag === "link" ? "href" : "src"] = victim + path;
  if (tag === "link") one.rel = "stylesheet";
  document.body.append(one);
}});
const posts = path => new Promise(told => {{
  const frame = document.createElement("iframe"), form = document.createElement("form");
  frame.name = "f" + path;
  let sent = false;
  frame.onload = () => {{ if (sent) told("sent") }};
  setTimeout(() => told("silent"), 3000);
  document.body.append(frame, form);
  Object.assign(form, {{method: "post", action: victim + path, target: frame.name}});
  form.innerHTML = '<input name="word" value="' + "0".repeat(64) + '">';
  sent = true;
  form.submit();
}});
const streams = path => new Promise(told => {{
  const source = new EventSource(victim + path, {{withCredentials: true}});
  source.onmessage = event => told("read:" + event.data);
  source.onerror = () => {{ source.close(); told("refused") }};
}});
const speaks = path => new Promise(told => {{
  const socket = new WebSocket(victim.replace("http", "ws") + path);
  socket.onopen = () => told("open");
  socket.onerror = () => told("refused");
}});
window.told = (async () => {{
  const told = {{}};
  for (const path of pages) {{
    told["read " + path] = await read(path, {{}});
    told["blind read " + path] = await read(path, {{mode: "no-cors"}});
    told["frame " + path] = await loads("iframe", path);
    told["script " + path] = await loads("script", path);
  }}
  for (const path of forms) {{
    const word = new URLSearchParams({{word: "0".repeat(64)}});
    told["post " + path] = await read(path, {{method: "POST", body: word}});
    told["blind post " + path] = await read(path, {{method: "POST", body: word, mode: "no-cors"}});
    told["put " + path] = await read(path, {{method: "PUT", body: "x", headers: {{"X-Own": "1"}}}});
    told["form " + path] = await posts(path);
  }}
  told["stream"] = await streams("/stream/nodes");
  told["socket"] = await speaks("/stream/nodes");
  return told;
}})();
"""


@asynccontextmanager
async def hostile_site(victim: str) -> AsyncIterator[int]:
    """Serve a page that attacks the web page at `victim` on a port of the loopback; yield the port."""

    async def page(request: web.Request) -> web.Response:
        script = TRIES.format(victim=victim)
        return web.Response(text=f"<!doctype html><body><script>{script}</script>", content_type="text/html")

    app = web.Application()
    app.add_routes([web.get("/", page)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
