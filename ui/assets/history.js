// The list of stored comparisons. Opening and deleting are decided by the server; this only draws and asks.
import { h } from "/ui/dom.js";
import { rate, ratio, when } from "/ui/format.js";

function lanes(row) {
  return row.runs.map((run) => h("span", { class: "run-chip", "data-phase": run.status, title: `${run.mode.toUpperCase()}: ${run.status}` },
    h("b", {}, run.mode.toUpperCase()), ` ${run.status === "finished" ? `${rate(run.rate)} tok/s` : run.status}`));
}

function erase(row, trigger) {
  const box = h("span", { class: "erase" });
  const ask = h("button", { type: "button", class: "quiet", "aria-label": `Delete ${row.title}` }, "Delete");
  const yes = h("button", { type: "button", class: "quiet danger" }, "Yes, delete");
  const no = h("button", { type: "button", class: "quiet" }, "Keep");
  ask.addEventListener("click", () => { box.replaceChildren("Delete for good?", yes, no); no.focus(); });
  no.addEventListener("click", () => { box.replaceChildren(ask); ask.focus(); });
  yes.addEventListener("click", () => trigger("erase", { comparison: row.id }));
  box.append(ask);
  return box;
}

function item(row, trigger) {
  const open = h("button", { type: "button", class: "history-open", title: "Open this comparison" }, h("span", { class: "history-title", dir: "auto" }, row.title));
  open.addEventListener("click", () => trigger("pick", { comparison: row.id }));
  const links = ["json", "jsonl", "csv"].map((form) => h("a", { class: "quiet", href: `/api/comparisons/${row.id}/export.${form}`, download: "" }, form.toUpperCase()));
  const without = row.no_speed_up && h("span", { class: "history-speed", "data-kind": "none" }, `SSD / AR n/a: ${row.no_speed_up}`);
  const speedUp = row.speed_up === null ? without : h("span", { class: "history-speed", "data-kind": row.speed_up >= 1 ? "good" : "slow" }, `SSD ${ratio(row.speed_up)} of AR`);
  return h("li", { "data-id": row.id }, open,
    h("div", { class: "history-line" }, h("time", {}, when(row.created)), ...lanes(row), speedUp),
    h("div", { class: "history-actions" }, h("span", { class: "exports" }, "Export ", ...links), erase(row, trigger)));
}

export function mount(element, trigger, props, watch) {
  const list = element.querySelector(".history-list");
  const foot = element.querySelector(".history-foot");
  const draw = () => {
    const { rows = [], total = 0, before = null, next = null, filtered = false } = props.value || {};
    list.replaceChildren(...rows.map((row) => item(row, trigger)));
    if (!rows.length) list.append(h("li", { class: "history-empty" }, filtered ? "Nothing matches. Change the search or the filters." : "Nothing here yet. Every comparison you run is kept here."));
    const newest = h("button", { type: "button", class: "quiet" }, "Newest");
    const older = h("button", { type: "button", class: "quiet" }, "Older");
    newest.disabled = before === null;
    older.disabled = next === null;
    newest.addEventListener("click", () => trigger("turn", { before: null }));
    older.addEventListener("click", () => trigger("turn", { before: next }));
    const paged = before !== null || next !== null;
    foot.replaceChildren(h("span", {}, total === 1 ? "1 comparison" : `${total} comparisons`), ...(paged ? [newest, older] : []));
  };
  watch("value", draw);
  draw();
}
