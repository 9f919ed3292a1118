"use strict";
(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => Array.from(root.querySelectorAll(selector));
  const root = document.documentElement;
  const findings = $$(".finding"), causes = $$(".cause"), folds = $$(".fold");
  const families = $$(".map tbody").map((body, place) => ({
    body, place, name: body.dataset.name, bad: +body.dataset.bad, rules: +body.dataset.rules,
    head: $(".head", body), button: $(".head button", body), open: false,
    rows: $$("tr.op", body).map((row) => ({ row, op: row.dataset.op.toLowerCase(), verdicts: row.dataset.v.split(" ") })),
  }));
  const words = (one) => (one ? $("summary", one).textContent.toLowerCase() : "");
  const said = findings.map((one) => `${words(one)} ${words(one.closest(".cause"))}`);
  const form = $("#filters"), text = $("#text"), tiles = $$(".tile"), selects = $$("select[data-filter]");
  const count = (many) => many.toLocaleString("en");
  let at = -1;

  function on() {
    return new Set(tiles.filter((tile) => tile.getAttribute("aria-pressed") === "true").map((tile) => tile.dataset.verdict));
  }

  function passes(one, words, place, verdicts, wanted) {
    const held = one.dataset;
    return verdicts.has(held.v) && said[place].includes(words) && wanted.every(([name, value]) => {
      const has = held[name];
      return name === "mesh" ? has.split("|").includes(value) : has.split(" ").includes(value);
    });
  }

  function filter() {
    const words = text.value.trim().toLowerCase(), verdicts = on(), every = verdicts.size === tiles.length;
    const wanted = selects.filter((select) => select.value).map((select) => [select.dataset.filter, select.value]);
    let seen = 0;
    findings.forEach((one, place) => {
      one.hidden = !passes(one, words, place, verdicts, wanted);
      seen += one.hidden ? 0 : 1;
    });
    $("#found-count").textContent = seen === findings.length ? `${count(seen)} findings` : `${count(seen)} of ${count(findings.length)} findings`;
    $("#no-findings").hidden = seen > 0;
    for (const cause of causes) {
      const own = $$(".finding", cause), left = own.filter((one) => !one.hidden).length;
      cause.hidden = left === 0;
      $(".many", cause).textContent = `${left < own.length ? `${count(left)} of ` : ""}${count(own.length)} finding${own.length === 1 ? "" : "s"}`;
    }
    for (const fold of folds) fold.hidden = $$(".finding", fold).every((one) => one.hidden);
    const open = causes.filter((one) => !one.hidden).length;
    if (causes.length) $("#cause-count").textContent = open === causes.length ? `${count(open)} causes` : `${count(open)} of ${count(causes.length)} causes`;
    const kept = wanted.length ? new Set(findings.filter((one) => !one.hidden).map((one) => one.dataset.op.toLowerCase())) : null;
    let shown = 0, all = 0;
    for (const family of families) {
      let here = 0;
      for (const one of family.rows) {
        const judged = every || one.verdicts.some((verdict) => verdicts.has(verdict));
        one.fits = judged && (one.op.includes(words) || family.name.toLowerCase().includes(words)) && (!kept || kept.has(one.op));
        here += one.fits ? 1 : 0;
        all += 1;
      }
      shown += here;
      family.body.hidden = here === 0;
      for (const one of family.rows) one.row.hidden = !one.fits || (family.head !== null && !family.open && !words);
      if (family.button) family.button.setAttribute("aria-expanded", String(family.open || words !== ""));
    }
    $("#map-count").textContent = shown === all ? `${count(all)} overloads` : `${count(shown)} of ${count(all)} overloads`;
  }

  function sorted() {
    const order = { bad: (a, b) => a.place - b.place, name: (a, b) => (a.name < b.name ? -1 : 1), rules: (a, b) => b.rules - a.rules || a.place - b.place };
    const table = $(".map");
    table.append(...[...families].sort(order[$("#sort").value]).map((family) => family.body));
  }

  function tell(words) {
    const toast = $("#said");
    toast.textContent = words;
    toast.classList.add("on");
    setTimeout(() => toast.classList.remove("on"), 1800);
  }

  async function copy(words, told) {
    try {
      await navigator.clipboard.writeText(words);
    } catch {
      const area = document.createElement("textarea");
      area.value = words;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    tell(told);
  }

  function open(id) {
    const one = id ? document.getElementById(id) : null;
    if (!one || one.tagName !== "DETAILS") return;
    if (one.hidden) clear();
    one.open = true;
    go(one);
  }

  function go(one) {
    findings.forEach((other) => other.classList.remove("at"));
    at = findings.indexOf(one);
    if (at >= 0) one.classList.add("at");
    const cause = one.closest(".cause");
    if (cause) cause.open = true;
    const fold = one.closest(".fold");
    if (fold) fold.open = true;
    $("summary", one).focus({ preventScroll: true });
    one.scrollIntoView({ block: "start" });
  }

  function step(by) {
    let next = at + by;
    while (findings[next] && findings[next].hidden) next += by;
    if (findings[next]) go(findings[next]);
  }

  function clear() {
    form.reset();
    tiles.forEach((tile) => tile.setAttribute("aria-pressed", "true"));
    filter();
  }

  const pressed = (tile) => tile.getAttribute("aria-pressed") === "true";
  tiles.forEach((tile) => tile.addEventListener("click", () => {
    const every = tiles.every(pressed), last = pressed(tile) && tiles.filter(pressed).length === 1;
    tiles.forEach((other) => {
      const keep = last || (other === tile ? every || !pressed(other) : !every && pressed(other));
      other.setAttribute("aria-pressed", String(keep));
    });
    filter();
  }));
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  $("#clear").addEventListener("click", clear);
  families.filter((family) => family.button).forEach((family) => family.button.addEventListener("click", () => {
    family.open = !family.open;
    filter();
  }));
  $("#fold").addEventListener("click", (event) => {
    const unfold = event.target.getAttribute("aria-expanded") !== "true";
    event.target.setAttribute("aria-expanded", String(unfold));
    event.target.textContent = unfold ? "Fold all" : "Unfold all";
    families.forEach((family) => { family.open = unfold; });
    filter();
  });
  $("#sort").addEventListener("change", sorted);
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a, button");
    if (!link) return;
    if (link.dataset.op) {
      text.value = link.dataset.op;
      const takes = selects.find((select) => select.dataset.filter === "takes");
      selects.forEach((select) => { select.value = ""; });
      if (takes) takes.value = link.dataset.takes;
      filter();
      const first = findings.find((one) => !one.hidden);
      if (first) { event.preventDefault(); first.open = true; go(first); }
    } else if (link.classList.contains("anchor")) {
      event.preventDefault();
      history.replaceState(null, "", link.hash);
      copy(link.href, "Link copied");
    } else if (link.classList.contains("copy")) {
      copy($("pre", link.parentElement).textContent, "Script copied");
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") {
      if (event.target.blur && event.target === text) text.blur();
      clear();
    } else if (!event.target.closest("input, select, textarea")) {
      if (event.key === "/") { event.preventDefault(); text.focus(); text.select(); }
      else if (event.key === "j") step(1);
      else if (event.key === "k") step(-1);
    }
  });
  window.addEventListener("hashchange", () => open(location.hash.slice(1)));
  window.addEventListener("beforeprint", () => [...causes, ...findings].forEach((one) => { if (!one.hidden) one.open = true; }));

  const theme = $("#theme");
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const named = () => { theme.textContent = dark() ? "Light" : "Dark"; };
  theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; named(); });
  named();
  $$("#theme, #filters, .tools, .keys").forEach((one) => { one.hidden = false; });
  filter();
  open(location.hash.slice(1));
})();
