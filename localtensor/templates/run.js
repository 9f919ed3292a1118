"use strict";
(() => {
  const all = (selector, root = document) => Array.from(root.querySelectorAll(selector));
  const CHARACTER = 5.6;
  const text = (seconds) => (seconds < 1e-3 ? `${+(seconds * 1e6).toPrecision(4)} us` : seconds < 1 ? `${+(seconds * 1e3).toPrecision(4)} ms` : `${+seconds.toPrecision(4)} s`);

  const lines = all(".line").map((line) => {
    const svg = line.querySelector("svg"), ticks = line.querySelector(".ticks"), seconds = +line.dataset.seconds;
    const height = svg.viewBox.baseVal.height;
    const bars = all("g", svg).map((g) => ({ g, rect: g.firstElementChild, b: +g.dataset.b, e: +g.dataset.e, label: g.dataset.label, text: null }));
    let from = 0, share = 1;

    function draw() {
      const width = svg.clientWidth || 1200;
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      for (const bar of bars) {
        const x = Math.max(((bar.b - from) / share) * width, -1), end = Math.min(((bar.e - from) / share) * width, width + 1);
        const shown = end >= 0 && x <= width;
        bar.g.style.display = shown ? "" : "none";
        if (!shown) continue;
        bar.rect.setAttribute("x", x);
        bar.rect.setAttribute("width", Math.max(end - x, 0.4));
        const room = Math.floor((end - Math.max(x, 0) - 6) / CHARACTER);
        const words = room < 3 ? "" : bar.label.length <= room ? bar.label : `${bar.label.slice(0, room - 1)}…`;
        if (words && !bar.text) {
          bar.text = document.createElementNS("http://www.w3.org/2000/svg", "text");
          bar.text.setAttribute("y", +bar.rect.getAttribute("y") + 10);
          bar.g.append(bar.text);
        }
        if (bar.text) {
          bar.text.textContent = words;
          bar.text.setAttribute("x", Math.max(x, 0) + 3);
        }
      }
      ticks.replaceChildren(...[0, 0.25, 0.5, 0.75, 1].map((part) => Object.assign(document.createElement("span"), { textContent: text((from + part * share) * seconds) })));
    }

    function move(begin, width) {
      share = Math.min(Math.max(width, 1e-6), 1);
      from = Math.min(Math.max(begin, 0), 1 - share);
      draw();
    }

    const zoom = (factor, at = 0.5) => move(from + share * at * (1 - factor), share * factor);
    svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
      event.preventDefault();
      zoom(event.deltaY > 0 || event.deltaX > 0 ? 1.25 : 0.8, event.offsetX / svg.clientWidth);
    }, { passive: false });
    let held = null;
    svg.addEventListener("pointerdown", (event) => { held = { x: event.clientX, from }; svg.setPointerCapture(event.pointerId); });
    svg.addEventListener("pointermove", (event) => { if (held) move(held.from - ((event.clientX - held.x) / svg.clientWidth) * share, share); });
    svg.addEventListener("pointerup", () => { held = null; });
    svg.addEventListener("dblclick", (event) => zoom(0.5, event.offsetX / svg.clientWidth));
    const does = { in: () => zoom(0.5), out: () => zoom(2), left: () => move(from - share / 2, share), right: () => move(from + share / 2, share), all: () => move(0, 1) };
    return { line, draw, does };
  });

  const current = () => lines.find((one) => !one.line.hidden);
  for (const button of all("button[data-zoom]")) button.addEventListener("click", () => current().does[button.dataset.zoom]());
  for (const button of all("button[data-clock]")) button.addEventListener("click", () => {
    for (const other of all("button[data-clock]")) other.setAttribute("aria-pressed", String(other === button));
    for (const one of lines) one.line.hidden = one.line.dataset.clock !== button.dataset.clock;
    current().draw();
  });
  addEventListener("resize", () => current().draw());
  if (lines.length) current().draw();
})();
