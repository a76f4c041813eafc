// What is known about one token, beside the token. One element for the whole page.
import { h } from "/ui/dom.js";
import { decimal, percent, seconds, visible } from "/ui/format.js";

export const ORIGINS = {
  target: ["Target", "AR: the target made it alone"],
  draft: ["Draft", "SD: drafted, and accepted by the target"],
  cache_hit: ["Cache hit", "SSD: of a speculation that was found in the cache, then accepted"],
  fallback: ["Fallback", "SSD: drafted after a cache miss, then accepted"],
  bonus: ["Bonus", "the target's own token at the end of a round"],
};

const box = h("div", { class: "token-tip", role: "tooltip", id: "token-tip", hidden: true });
let shown = null;

function line(name, value) {
  return [h("dt", {}, name), h("dd", {}, value)];
}

function alternatives(rows) {
  if (!rows.length) return null;
  const items = rows.map(([id, text, p]) =>
    h("li", {}, h("code", {}, visible(text) || "∅"), h("i", { class: "bar", style: `--p:${p ?? 0}` }), h("span", {}, percent(p)), h("small", {}, `#${id}`)));
  return h("ol", { class: "alternatives", "aria-label": "The target's most probable tokens" }, ...items);
}

function fill(token, index, previous, held) {
  const [id, text, time, origin, round, place, p, q, alts] = token;
  const delta = previous ? time - previous[2] : null;
  const list = h("dl", {},
    ...line("token", `#${id} at ${index}`), ...line("origin", `${ORIGINS[origin][0]}: ${ORIGINS[origin][1]}`),
    ...line("time", `${seconds(time)}${delta === null ? "" : delta === 0 ? ", with the one before" : `, ${seconds(delta)} after the one before`}`),
    ...line("round", `${round}, place ${place}`),
    ...line("p target", p === null ? "n/a" : `${percent(p)}`), ...line("q draft", q === null ? "n/a" : `${percent(q)}`),
    ...(p !== null && q ? line("p / q", decimal(p / q)) : []));
  const note = held ? h("p", {}, `Completes a character that ${held} earlier token${held > 1 ? "s" : ""} began.`) : null;
  box.replaceChildren(h("code", { class: "piece" }, visible(text)), list, ...[note, alternatives(alts)].filter(Boolean));
}

function place(anchor) {
  const target = anchor.getClientRects()[0] || anchor.getBoundingClientRect();
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  const left = Math.max(8, Math.min(target.left, innerWidth - width - 8));
  const below = target.bottom + 6 + height < innerHeight;
  box.style.left = `${left}px`;
  box.style.top = `${below ? target.bottom + 6 : Math.max(8, target.top - height - 6)}px`;
}

export function showToken(anchor, tokens, index) {
  if (!box.isConnected) document.body.append(box);
  let held = 0;
  while (tokens[index][1] !== "" && index - held > 0 && tokens[index - held - 1][1] === "") held += 1;
  fill(tokens[index], index, tokens[index - 1], held);
  hideToken();
  anchor.setAttribute("aria-describedby", box.id);
  anchor.classList.add("is-shown");
  shown = anchor;
  place(anchor);
}

export function hideToken() {
  box.hidden = true;
  if (shown) {
    shown.removeAttribute("aria-describedby");
    shown.classList.remove("is-shown");
  }
  shown = null;
}

document.addEventListener("scroll", hideToken, { capture: true, passive: true });
