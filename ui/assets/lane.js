// One lane: the answer as coloured token spans, its phase, and its figures.
import { copyText, h, setText } from "/ui/dom.js";
import { count, decimal, milliseconds, percent, rate, seconds } from "/ui/format.js";
import { hideToken, showToken } from "/ui/tooltip.js";

const TITLES = {
  ar: ["AR", "Autoregressive", "the target alone"],
  sd: ["SD", "Speculative", "draft, then verify"],
  ssd: ["SSD", "Saguaro", "draft while verifying"],
};
const STOPS = { eos: "complete", stop: "stop string", length: "token limit", user: "by you", error: "error" };
// A stored answer of thousands of tokens must not freeze the page while it is drawn.
const SPANS_PER_FRAME = 1200;
const FIGURES = [
  ["elapsed", "elapsed", (f) => seconds(f.elapsed)],
  ["first token", "time to the first token", (f) => seconds(f.time_to_first_token)],
  ["tokens", "tokens committed", (f) => count(f.num_tokens)],
  ["acceptance", "accepted / drafted, without the bonus token", (f) => percent(f.draft_acceptance_rate)],
  ["tokens / round", "tokens per speculated round: 1 + accepted, over the rounds with drafted tokens", (f) => decimal(f.mean_acceptance_length)],
  ["hit rate", "cache hits / rounds after the first", (f) => percent(f.cache_hit_rate)],
  ["fallbacks", "rounds whose speculation came from the fallback", (f) => count(f.num_fallbacks)],
  ["wait / round", "mean time that the target waited for a speculation", (f) => milliseconds(f.mean_wait_ms)],
  ["overlap", "share of the cache's build time inside the target's verifications", (f) => percent(f.build_overlap)],
];

export class Lane {
  constructor(mode) {
    const [short, name, how] = TITLES[mode];
    this.mode = mode;
    this.tokens = [];
    this.drawn = 0;
    this.stick = true;
    this.text = h("div", { class: "lane-text", tabindex: "0", role: "group", dir: "auto", "aria-label": `${short} answer; arrow keys walk the tokens` });
    this.phase = h("span", { class: "phase", role: "status" });
    this.note = h("p", { class: "lane-note", hidden: true });
    this.speed = h("b", {}, "n/a");
    this.bar = h("i", { class: "speed-bar", "aria-hidden": "true" });
    this.cells = FIGURES.map(() => h("dd", { class: "none" }, "n/a"));
    this.empty = h("p", { class: "lane-empty" }, `${name} decoding: ${how}.`);
    this.element = h("section", { class: "lane", "data-mode": mode, "data-phase": "empty", "aria-label": `${short}, ${name}` },
      h("header", {}, h("h3", {}, short), h("span", { class: "lane-name" }, name), this.phase, this.copyButton(short)),
      h("div", { class: "lane-body" }, this.empty, this.text), this.note,
      h("footer", {}, h("p", { class: "speed" }, this.speed, h("small", {}, "tokens/s"), this.bar),
        h("dl", {}, ...FIGURES.map(([label, title], i) => h("div", { title }, h("dt", {}, label), this.cells[i])))));
    this.listen();
  }

  copyButton(short) {
    const button = h("button", { type: "button", class: "quiet copy", "aria-label": `Copy the ${short} answer` }, "Copy");
    button.addEventListener("click", async () => {
      await copyText(this.rawText());
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1200);
    });
    return button;
  }

  rawText() {
    return this.tokens.map((token) => token[1]).join("");
  }

  listen() {
    const text = this.text;
    text.addEventListener("scroll", () => { this.stick = text.scrollHeight - text.scrollTop - text.clientHeight < 24; }, { passive: true });
    text.addEventListener("mouseover", (event) => this.show(event.target));
    text.addEventListener("mouseleave", hideToken);
    text.addEventListener("focusin", (event) => this.show(event.target));
    text.addEventListener("focusout", hideToken);
    text.addEventListener("keydown", (event) => this.walk(event));
    text.addEventListener("copy", (event) => this.copySelection(event));
  }

  show(span) {
    if (span.index === undefined) hideToken();
    else showToken(span, this.tokens, span.index);
  }

  walk(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    let index = (document.activeElement.index ?? (step > 0 ? -1 : this.drawn)) + step;
    while (this.tokens[index] && this.tokens[index][1] === "") index += step;
    this.text.querySelector(`[data-i="${index}"]`)?.focus();
  }

  copySelection(event) {
    // The browser would add what the spans look like; only the characters are wanted.
    event.clipboardData.setData("text/plain", String(document.getSelection()));
    event.preventDefault();
  }

  update(lane) {
    if (lane.first < this.tokens.length) lane.tokens.splice(0, this.tokens.length - lane.first);
    for (const token of lane.tokens) this.tokens.push(token);
    this.state = lane;
    this.received = performance.now();
    this.element.dataset.phase = lane.phase;
    this.empty.hidden = this.tokens.length > 0 || !["empty", "queued"].includes(lane.phase);
    setText(this.empty, lane.phase === "queued" ? "Waits for its turn: lanes run one after another, so that each has the machine to itself." : this.empty.textContent);
    this.tick();
    this.drawNote(lane);
  }

  draw() {
    const end = Math.min(this.tokens.length, this.drawn + SPANS_PER_FRAME);
    if (end === this.drawn) return false;
    const fragment = document.createDocumentFragment();
    for (let index = this.drawn; index < end; index += 1) fragment.append(this.span(index));
    this.drawn = end;
    this.text.append(fragment);
    if (this.stick) this.text.scrollTop = this.text.scrollHeight;
    return end < this.tokens.length;
  }

  span(index) {
    const span = document.createElement("span");
    const token = this.tokens[index];
    span.className = token[1] === "" ? "tok held" : `tok ${token[3]}`;
    span.textContent = token[1];
    span.index = index;
    span.dataset.i = index;
    span.tabIndex = -1;
    return span;
  }

  get active() {
    return Boolean(this.state) && ["queued", "prefill", "decode"].includes(this.state.phase);
  }

  tick() {
    const { phase, figures, clock, progress } = this.state;
    const elapsed = clock === null ? figures.elapsed : clock + (performance.now() - this.received) / 1000;
    const shownFigures = { ...figures, elapsed: phase === "queued" ? null : elapsed };
    setText(this.phase, this.phaseText(phase, progress));
    setText(this.speed, rate(figures.decode_tokens_per_second));
    FIGURES.forEach(([, , format], i) => {
      setText(this.cells[i], format(shownFigures));
      this.cells[i].classList.toggle("none", this.cells[i].textContent === "n/a");
    });
  }

  phaseText(phase, progress) {
    if (phase === "prefill") return progress ? `prefill ${Math.round(progress * 100)}%` : "prefill";
    if (phase === "finished") return `done: ${STOPS[this.state.stop_reason] ?? this.state.stop_reason}`;
    if (phase === "stopped") return `stopped: ${STOPS[this.state.stop_reason] ?? this.state.stop_reason}`;
    return phase;
  }

  drawNote(lane) {
    const lines = [...lane.notices];
    if (lane.phase === "failed") lines.push(`Failed: ${lane.error}`);
    if (lane.phase === "interrupted") lines.push("The program ended before this answer did; what was stored is shown.");
    this.note.hidden = lines.length === 0;
    this.note.dataset.kind = lane.phase === "failed" ? "error" : "info";
    setText(this.note, lines.join("\n"));
  }

  setShare(share) {
    this.bar.style.setProperty("--share", share);
  }
}
