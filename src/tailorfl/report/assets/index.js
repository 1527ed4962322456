// The list of runs: filter, sort, pick some and see them side by side.

const KEPT = "tailorfl-picked"; // while the window is open: one comes back from what was picked
let kept = [];
try { kept = JSON.parse(sessionStorage.getItem(KEPT) || "[]"); } catch { /* a browser may keep nothing */ }
const picked = new Set(kept);
const search = el("input", { type: "search", placeholder: "filter: words of a row, or settings as lr=0.1", "aria-label": "filter" });
const compare = el("button", { type: "button" });
const folders = el("section"), runs = el("section");
let data = null;

const address = (names) => `view?${names.map((name) => `run=${encodeURIComponent(name)}`).join("&")}`;
const parts = (name) => name.split(/(?<=[/,])/).flatMap((part) => [part, el("wbr")]); // where it may break first
const link = (name) => el("a", { href: address([name]) }, ...parts(name));
const moment = (seconds) => new Date(1000 * seconds).toLocaleString();

// All words must be there: in what is shown of a row, or as one of the settings of its run.
function matches(row) {
  const text = row.map((one) => one.text).join(" ").toLowerCase();
  const { alike, own } = data.settings, settings = [...alike, ...(own[row[0].text] ?? [])];
  return search.value.toLowerCase().split(/\s+/).every((word) => text.includes(word) || settings.includes(word));
}

function choice(name) {
  const box = el("input", { type: "checkbox", "aria-label": `pick ${name}` });
  box.checked = picked.has(name);
  box.addEventListener("change", () => { if (box.checked) picked.add(name); else picked.delete(name); count(); });
  return el("label", {}, box, " ", link(name));
}

function count() {
  try { sessionStorage.setItem(KEPT, JSON.stringify([...picked])); } catch { /* as above */ }
  compare.textContent = picked.size ? `show ${picked.size} side by side` : "pick runs to see them side by side";
  compare.disabled = !picked.size;
}

function list(table, rows, first) {
  const last = table.heads.findIndex((head) => head.name === "last change");
  const cells = new Map(rows.flatMap((row) => [[row[0], first(row[0].text)], ...(last < 0 ? [] : [[row[last], moment(row[last].value)]])]));
  return rows.length ? [el("h2", {}, table.title), tableOf({ ...table, rows }, (one) => cells.get(one) ?? one.text)] : [];
}

function draw() {
  const { runs: all, folders: several } = data;
  const found = all.rows.filter(matches), every = all.rows.length;
  folders.replaceChildren(...list(several, several.rows.filter(matches), link));
  runs.replaceChildren(...list(all, found, choice));
  if (!every) runs.replaceChildren(el("p", {}, "There is no run here yet. This page looks again by itself."));
  else if (!found.length) runs.replaceChildren(el("p", {}, "No run matches."));
  const of = found.length < every ? `${found.length} of ` : "";
  document.getElementById("state").textContent = `${of}${every} ${every === 1 ? "run" : "runs"}`;
}

function show(found) {
  data = found;
  const names = new Set(found.runs.rows.map((row) => row[0].text));
  for (const name of picked) if (!names.has(name)) picked.delete(name);
  document.querySelector("h1").textContent = document.title = found.title;
  keeping(draw);
  count();
  document.body.dataset.ready = "yes";
}

compare.addEventListener("click", () => { location.href = address([...picked]); });
search.addEventListener("input", () => { if (data) draw(); });
document.querySelector("main").replaceChildren(el("div", { class: "tools" }, search, compare), folders, runs);
watchTheme(() => {});
follow(document.body.dataset.source, show);
