// What all pages have: elements, tables that sort, light and dark.

function el(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(options)) {
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

const anchor = (...words) => words.join("-").toLowerCase().replace(/[^a-z0-9.]+/g, "-").replace(/^-|-$/g, "");

// Tables. A click on a head sorts, a second one turns the order; what has no value stays last.

const sorting = new Map(); // by table: which column, and whether it falls

function order(rows, column, falling) {
  const missing = (value) => value === null || value === undefined;
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  return [...rows].sort((one, other) => {
    const a = one[column].value, b = other[column].value;
    if (missing(a) || missing(b)) return missing(a) - missing(b);
    return falling ? compare(b, a) : compare(a, b);
  });
}

function tableOf(table, cell = (one) => one.text) {
  const name = anchor(table.panel || "", table.key);
  const body = el("tbody");
  const heads = table.heads.map((head, column) => {
    const press = el("button", { type: "button" }, head.name || "name");
    const th = el("th", { class: head.words ? "words" : "", title: head.about, scope: "col" }, press);
    press.addEventListener("click", () => {
      const before = sorting.get(name);
      const falling = before && before.column === column ? !before.falling : !head.words;
      sorting.set(name, { column, falling });
      fill();
    });
    return th;
  });
  function fill() {
    const by = sorting.get(name);
    heads.forEach((th, column) => {
      if (by && by.column === column) th.setAttribute("aria-sort", by.falling ? "descending" : "ascending");
      else th.removeAttribute("aria-sort");
    });
    const rows = by ? order(table.rows, by.column, by.falling) : table.rows;
    body.replaceChildren(...rows.map((row) =>
      el("tr", {}, ...row.map((one, column) => el("td", { class: table.heads[column].words ? "words" : "" }, cell(one))))));
  }
  fill();
  return el("div", { class: "scroll", id: name, tabindex: "0" },
    el("table", {}, el("thead", {}, el("tr", {}, ...heads)), body));
}

// What is drawn anew stays where it was, and so does who is in it by keyboard.

function keeping(redraw) {
  const boxes = [...document.querySelectorAll("main .scroll")].map((one) => [one.id, one.scrollLeft, one.scrollTop]);
  const focused = document.activeElement, top = scrollY;
  const find = focused?.closest("main") ? again(focused) : () => null;
  redraw();
  for (const [id, left, down] of boxes) document.getElementById(id)?.scrollTo({ left, top: down, behavior: "instant" });
  if (document.activeElement !== focused) (focused?.isConnected ? focused : find())?.focus({ preventScroll: true });
  scrollTo({ top, behavior: "instant" });
}

// How to find an element in what is drawn anew: by its name, and which of that name it is in the box that it is in.
function again(element) {
  const { tagName } = element, label = (one) => one.getAttribute("aria-label") || one.textContent;
  const said = label(element), box = element.closest("[id]"), id = box?.id;
  if (box === element) return () => document.getElementById(id);
  const alike = () => {
    const all = (id && document.getElementById(id)) || document.querySelector("main");
    return [...all.getElementsByTagName(tagName)].filter((one) => label(one) === said);
  };
  const place = alike().indexOf(element);
  return () => alike()[place];
}

// Light or dark: as the system has it, until somebody chooses.

const system = matchMedia("(prefers-color-scheme: dark)");
let theme = null;
try { theme = localStorage.getItem("tailorfl-theme"); } catch { /* a page from a disk may have no storage */ }

function isDark() { return theme ? theme === "dark" : system.matches; }

function paint(changed = () => {}) {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  document.getElementById("theme").textContent = isDark() ? "light" : "dark";
  changed();
}

function watchTheme(changed) {
  document.getElementById("theme").addEventListener("click", () => {
    theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("tailorfl-theme", theme); } catch { /* as above */ }
    paint(changed);
  });
  system.addEventListener("change", () => paint(changed));
  paint();
}

// A server is asked again and again; what has not changed is not sent again.

async function follow(address, show, pause = 1500) {
  let known = null;
  const state = document.getElementById("state");
  for (;;) {
    let wait = pause;
    try {
      const answer = await fetch(address, { headers: known ? { "If-None-Match": known } : {}, cache: "no-store" });
      if (answer.status === 200) {
        known = answer.headers.get("ETag");
        await show(await answer.json());
      } else if (answer.status !== 304) {
        throw new Error(await answer.text());
      }
      state.classList.remove("failed");
    } catch (error) {
      state.textContent = `${error.message || error}; trying again`;
      state.classList.add("failed");
      known = null;
      wait = 4 * pause;
    }
    await new Promise((next) => setTimeout(next, document.hidden ? 4 * wait : wait));
  }
}
