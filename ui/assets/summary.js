// The strip above the lanes: speed-ups, same tokens, speed per device.
import { h } from "/ui/dom.js";
import { rate, ratio } from "/ui/format.js";

function ratioTile({ fast, slow, measured, predicted, why }) {
  const tile = h("div", { class: "tile", "data-kind": measured === null ? "none" : measured >= 1 ? "good" : "slow" },
    h("span", { class: "tile-label" }, `${fast.toUpperCase()} / ${slow.toUpperCase()}`),
    h("b", {}, ratio(measured)),
    h("small", {}, measured === null ? why : predicted === null ? (measured >= 1 ? "faster" : "slower") : `predicted ${ratio(predicted)}`));
  tile.title = `Decode speed of ${fast.toUpperCase()} over ${slow.toUpperCase()}, same prompt, seed and settings`;
  return tile;
}

function sameTile({ answer, text }) {
  const kind = answer === null ? "none" : answer ? "good" : "bad";
  return h("div", { class: "tile same", "data-kind": kind, title: "Whether the complete answers have identical token ids" },
    h("span", { class: "tile-label" }, "Same tokens"), h("b", {}, answer === null ? "n/a" : answer ? "yes" : "no"),
    h("small", {}, answer === null ? "needs two complete answers" : answer ? "token for token" : text.replace(/^no: /, "")));
}

function deviceTile(perDevice) {
  const rows = Object.entries(perDevice).map(([mode, { rate: speed, devices, why }]) =>
    h("span", { title: why ?? "" }, `${mode.toUpperCase()} `, h("b", {}, rate(speed)), devices > 1 ? ` ×${devices}` : ""));
  return h("div", { class: "tile device", "data-kind": rows.length ? "plain" : "none", title: "Tokens a second divided by the devices at work" },
    h("span", { class: "tile-label" }, "Tokens/s per device"), h("p", {}, ...(rows.length ? rows : ["n/a"])));
}

export function drawSummary(element, summary) {
  const drawn = JSON.stringify(summary);
  if (element.dataset.drawn === drawn) return;
  element.dataset.drawn = drawn;
  const tiles = [...summary.ratios.map(ratioTile), sameTile(summary.same), deviceTile(summary.per_device)];
  element.replaceChildren(...tiles);
  element.hidden = false;
}
