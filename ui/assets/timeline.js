// Both devices of one run on one clock: spans as blocks, rounds marked as hit or miss. Wheel zooms, dragging moves.
import { h, setText } from "/ui/dom.js";
import { seconds } from "/ui/format.js";

const ROW = 18;
const GAP = 6;
const LEFT = 52;
const ROWS = { target: 0, draft: 1 };
const KINDS = ["prefill", "verify", "build", "step", "fallback", "wait"];

export class Timeline {
  constructor(mode) {
    this.mode = mode;
    this.spans = [];
    this.rounds = [];
    this.phase = "queued";
    this.canvas = h("canvas", { height: String(2 * ROW + 3 * GAP + 12), role: "img", "aria-label": `Timeline of the ${mode.toUpperCase()} run` });
    this.hint = h("small", { class: "timeline-hint" });
    this.element = h("figure", { class: "timeline", hidden: true }, h("figcaption", {}, mode.toUpperCase(), this.hint), this.canvas);
    this.view = null;
    this.canvas.addEventListener("wheel", (event) => this.zoom(event), { passive: false });
    this.canvas.addEventListener("pointermove", (event) => this.move(event));
    this.canvas.addEventListener("pointerleave", () => setText(this.hint, ""));
    this.canvas.addEventListener("dblclick", () => { this.view = null; this.paint(); });
    new ResizeObserver(() => this.paint()).observe(this.element);
  }

  add(lane) {
    this.spans.push(...lane.spans);
    this.rounds.push(...lane.rounds);
    this.phase = lane.phase;
  }

  draw() {
    const ready = !["queued", "prefill", "decode"].includes(this.phase) && this.spans.length > 0;
    if (ready && this.element.hidden) {
      this.element.hidden = false;
      requestAnimationFrame(() => this.paint());
    }
    return ready;
  }

  get end() {
    return this.spans.reduce((latest, span) => Math.max(latest, span[3]), 0);
  }

  paint() {
    const width = this.canvas.clientWidth;
    if (!width || this.element.hidden) return;
    const scale = devicePixelRatio || 1;
    const height = 2 * ROW + 3 * GAP + 12;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    this.view ??= [0, this.end];
    const style = getComputedStyle(this.element);
    this.paintRows(pen, width, style);
    this.paintRounds(pen, width, style);
  }

  x(time, width) {
    return LEFT + ((time - this.view[0]) / (this.view[1] - this.view[0])) * (width - LEFT);
  }

  paintRows(pen, width, style) {
    pen.font = `11px ${style.fontFamily}`;
    pen.fillStyle = style.getPropertyValue("--sg-soft");
    for (const [name, row] of Object.entries(ROWS)) pen.fillText(name, 0, GAP + row * (ROW + GAP) + 13);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, width - LEFT, 200);
    pen.clip();
    const colours = Object.fromEntries(KINDS.map((kind) => [kind, style.getPropertyValue(`--span-${kind}`)]));
    for (const [lane, kind, start, end] of this.spans) {
      if (end < this.view[0] || start > this.view[1]) continue;
      const left = this.x(start, width);
      const size = Math.max(0.6, this.x(end, width) - left);
      pen.fillStyle = colours[kind];
      pen.fillRect(left, GAP + ROWS[lane] * (ROW + GAP), size > 3 ? size - 0.8 : size, ROW);
    }
    pen.restore();
  }

  paintRounds(pen, width, style) {
    const top = 2 * (ROW + GAP) + GAP;
    for (const [, start, , , , , , cache] of this.rounds) {
      if (!cache || start < this.view[0] || start > this.view[1]) continue;
      const x = this.x(start, width);
      pen.fillStyle = style.getPropertyValue({ hit: "--sg-good", miss: "--sg-bad" }[cache] ?? "--sg-soft");
      if (cache === "hit") pen.fillRect(x, top, 2, 7);
      else { pen.beginPath(); pen.moveTo(x - 3, top + 7); pen.lineTo(x + 1, top); pen.lineTo(x + 5, top + 7); pen.fill(); }
    }
  }

  timeAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / (box.width - LEFT);
    return this.view[0] + Math.min(1, Math.max(0, share)) * (this.view[1] - this.view[0]);
  }

  zoom(event) {
    if (!event.ctrlKey && !event.shiftKey && Math.abs(event.deltaX) > Math.abs(event.deltaY)) return;
    event.preventDefault();
    const centre = this.timeAt(event);
    const factor = Math.exp(event.deltaY * 0.002);
    const [start, end] = this.view;
    this.view = [Math.max(0, centre - (centre - start) * factor), Math.min(this.end, centre + (end - centre) * factor)];
    this.paint();
  }

  move(event) {
    if (!this.view) return;
    if (event.buttons & 1) {
      const shift = (-event.movementX / (this.canvas.clientWidth - LEFT)) * (this.view[1] - this.view[0]);
      const bounded = Math.max(-this.view[0], Math.min(this.end - this.view[1], shift));
      this.view = this.view.map((time) => time + bounded);
      this.paint();
      return;
    }
    const time = this.timeAt(event);
    const row = event.offsetY < GAP + ROW + GAP / 2 ? "target" : "draft";
    const span = this.spans.find(([lane, , start, end]) => lane === row && start <= time && time <= end);
    const round = span && this.rounds.find(([index]) => index === span[4]);
    const outcome = round ? ` · round ${round[0]}: ${round[6]} of ${round[5]} accepted${round[7] ? `, cache ${round[7]}` : ""}` : "";
    setText(this.hint, span ? ` ${row} ${span[1]} ${seconds(span[3] - span[2])} at ${seconds(span[2])}${outcome}` : ` ${seconds(time)}`);
  }
}
