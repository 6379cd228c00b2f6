// Puts what the daemon tells into the page, as it comes. Without it the page stays as it was loaded, and all its forms work.
"use strict";
(() => {
  const stream = document.body.dataset.stream;
  if (!stream || !window.EventSource) return;
  const link = document.getElementById("link");
  const said = document.getElementById("said");
  const log = document.getElementById("log");

  // Changes as little as it can, so that what is selected, focused, scrolled or unfolded stays so.
  const morph = (old, fresh) => {
    if (old.isEqualNode(fresh)) return;
    if (old.nodeType !== Node.ELEMENT_NODE || old.nodeName !== fresh.nodeName || old.id !== fresh.id) {
      old.replaceWith(fresh);
      return;
    }
    for (const { name } of [...old.attributes]) {
      if (!fresh.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
    }
    for (const { name, value } of [...fresh.attributes]) {
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    const olds = [...old.childNodes];
    const news = [...fresh.childNodes];
    news.forEach((child, place) => (place < olds.length ? morph(olds[place], child) : old.append(child)));
    olds.slice(news.length).forEach((child) => child.remove());
  };

  const place = (id, html) => {
    const old = document.getElementById(id);
    if (!old) return;
    const parsed = new DOMParser().parseFromString(html, "text/html");
    if (parsed.body.firstElementChild) morph(old, document.importNode(parsed.body.firstElementChild, true));
  };

  // A lone carriage return goes back to the beginning of its line.
  const print = (before, more) => {
    const whole = before + more;
    if (!whole.includes("\r")) return whole;
    return whole.split("\n").map((line) => {
      const back = line.lastIndexOf("\r");
      return back < 0 ? line : line.slice(back + 1);
    }).join("\n");
  };

  const told = (text) => {
    if (link.textContent !== text) link.textContent = text;
  };

  const after = log ? "?after=" + encodeURIComponent(log.dataset.place || "") : "";
  const source = new EventSource(stream + after);
  source.onopen = () => {
    link.classList.add("live");
    told("live");
  };
  source.onerror = () => {
    link.classList.remove("live");
    told(source.readyState === EventSource.CLOSED
      ? "not live: run `mesh top --web` again, or reload"
      : "not connected; trying again");
  };
  source.addEventListener("part", (event) => {
    const { id, html } = JSON.parse(event.data);
    place(id, html);
  });
  source.addEventListener("say", (event) => {
    said.textContent = JSON.parse(event.data);
  });
  source.addEventListener("log", (event) => {
    if (!log) return;
    const { from, text, most } = JSON.parse(event.data);
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    const shown = print(from === "start" ? "" : log.textContent, text);
    log.textContent = shown.length > most ? shown.slice(shown.indexOf("\n", shown.length - most) + 1) : shown;
    if (follows) log.scrollTop = log.scrollHeight;
  });
  if (log) log.scrollTop = log.scrollHeight;
  window.addEventListener("pagehide", () => source.close());
})();
