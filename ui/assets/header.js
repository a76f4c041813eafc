// Title line with the engine's status.
import { h, setText } from "/ui/dom.js";
import { describe, onStatus } from "/ui/status.js";

export function mount(element) {
  const text = h("span", {}, "Connecting");
  const bar = h("i", { class: "pill-bar" });
  const pill = h("div", { class: "pill", role: "status", "data-state": "starting" }, h("b", { class: "dot", "aria-hidden": "true" }), text, bar);
  const pair = h("span", { class: "pair" });
  element.querySelector(".title-right").append(pair, pill);
  onStatus((status) => {
    setText(text, describe(status));
    pill.dataset.state = status.state === "ready" && !(status.info && status.info.draft) ? "partial" : status.state;
    bar.style.width = status.state === "loading" ? `${(status.progress ?? 0) * 100}%` : "0";
    const info = status.info;
    setText(pair, info ? `${info.target.name}${info.draft ? ` + ${info.draft.name}` : ""}` : "");
    document.body.dataset.engine = status.state;
  });
}
