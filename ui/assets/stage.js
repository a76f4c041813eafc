// The comparison on show: follows it over server-sent events and hands what is new to the lanes.
import { h, setText } from "/ui/dom.js";
import { settingsLine, when } from "/ui/format.js";
import { Lane } from "/ui/lane.js";
import { refreshStatus } from "/ui/status.js";
import { drawSummary } from "/ui/summary.js";
import { Timeline } from "/ui/timeline.js";
import { ORIGINS, hideToken } from "/ui/tooltip.js";

class Stage {
  constructor(element, trigger) {
    this.trigger = trigger;
    this.caption = element.querySelector(".stage-caption");
    this.summary = element.querySelector(".stage-summary");
    this.laneBox = element.querySelector(".stage-lanes");
    this.timelineBox = element.querySelector(".stage-timelines");
    this.lanes = new Map();
    this.timelines = new Map();
    this.frame = null;
    element.querySelector(".stage-legend").append(...legend());
    document.addEventListener("visibilitychange", () => this.onVisibility());
    setInterval(() => { for (const lane of this.lanes.values()) if (lane.active && performance.now() - lane.received > 240) lane.tick(); }, 250);
    this.build(["ar", "sd", "ssd"]);
  }

  open(value) {
    const id = value && value.comparison;
    this.close();
    this.id = id || null;
    this.cursor = "";
    this.ended = !id;
    setRunning(Boolean(id));
    const address = new URL(location.href);
    if (id) address.searchParams.set("comparison", id);
    else address.searchParams.delete("comparison");
    history.replaceState(history.state, "", address);
    if (id) this.connect();
  }

  connect() {
    const source = new EventSource(`/api/comparisons/${encodeURIComponent(this.id)}/events?cursor=${this.cursor}`);
    this.source = source;
    source.addEventListener("header", (event) => this.onHeader(JSON.parse(event.data)));
    source.addEventListener("update", (event) => { this.cursor = event.lastEventId; this.onUpdate(JSON.parse(event.data)); });
    source.addEventListener("ahead", (event) => this.showAhead(JSON.parse(event.data).ahead));
    source.addEventListener("end", () => { this.ended = true; this.close(); refreshStatus(); });
    source.addEventListener("error", () => { if (source.readyState === EventSource.CLOSED) this.onLost(); });
  }

  close() {
    this.source?.close();
    this.source = null;
  }

  async onLost() {
    const id = this.id;
    this.close();
    setRunning(false);
    this.ended = true;
    const why = await whyLost(id);
    // Something else may have been opened in the meantime.
    if (this.id !== id || this.source) return;
    this.caption.replaceChildren(h("p", { class: "notice", "data-kind": "error", role: "alert" }, why));
  }

  onVisibility() {
    // A browser allows six connections to one server: a tab that nobody sees gives its own back and catches up later.
    if (document.hidden) this.close();
    else if (this.id && !this.ended && !this.source) this.connect();
  }

  onHeader(header) {
    if (this.cursor) return;
    this.build(header.modes);
    const reuse = h("button", { type: "button", class: "quiet", title: "Put this prompt and these settings into the form" }, "Use prompt and settings");
    reuse.addEventListener("click", () => this.trigger("reuse", { comparison: header.comparison_id }));
    const links = ["json", "jsonl", "csv"].map((form) =>
      h("a", { class: "quiet", href: `/api/comparisons/${header.comparison_id}/export.${form}`, download: "" }, form.toUpperCase()));
    this.state = h("span", { class: "stage-state", role: "status" });
    this.caption.replaceChildren(
      h("p", { class: "stage-prompt", dir: "auto" }, header.prompt),
      h("p", { class: "stage-settings" }, settingsLine(header.settings)),
      h("p", { class: "stage-actions" }, h("time", {}, when(header.created)), this.state, reuse, h("span", { class: "exports" }, "Export ", ...links)));
  }

  build(modes) {
    hideToken();
    this.lanes = new Map(modes.map((mode) => [mode, new Lane(mode)]));
    this.timelines = new Map(modes.map((mode) => [mode, new Timeline(mode)]));
    this.laneBox.style.setProperty("--lanes", modes.length);
    this.laneBox.replaceChildren(...[...this.lanes.values()].map((lane) => lane.element));
    this.timelineBox.replaceChildren(...[...this.timelines.values()].map((timeline) => timeline.element));
    this.timelineBox.parentElement.hidden = true;
  }

  onUpdate(update) {
    setRunning(update.active);
    this.showAhead(update.ahead);
    for (const [mode, lane] of Object.entries(update.lanes)) {
      this.timelines.get(mode).add(lane);
      this.lanes.get(mode).update(lane);
    }
    this.drawShares();
    drawSummary(this.summary, update.summary);
    const drawn = [...this.timelines.values()].map((timeline) => timeline.draw());
    this.timelineBox.parentElement.hidden = !drawn.some(Boolean);
    this.requestDraw();
  }

  showAhead(ahead) {
    setText(this.state, ahead > 0 ? `queued: ${ahead} comparison${ahead > 1 ? "s" : ""} ahead` : "");
  }

  drawShares() {
    const speeds = [...this.lanes.values()].map((lane) => lane.state?.figures.decode_tokens_per_second ?? 0);
    const best = Math.max(...speeds);
    [...this.lanes.values()].forEach((lane, i) => lane.setShare(best ? speeds[i] / best : 0));
  }

  requestDraw() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      const more = [...this.lanes.values()].map((lane) => lane.draw());
      if (more.some(Boolean)) this.requestDraw();
    });
  }
}

function setRunning(running) {
  document.body.toggleAttribute("data-running", running);
}

// An event source does not tell the status of a refusal: ask once more, in a way that does.
async function whyLost(id) {
  const asking = new AbortController();
  try {
    const response = await fetch(`/api/comparisons/${encodeURIComponent(id)}/events`, { cache: "no-store", signal: asking.signal });
    if (response.status === 404) return "This comparison is unknown: it may have been deleted.";
    if (!response.ok) return (await response.json()).detail;
  } catch {
    // Said below.
  } finally {
    asking.abort();
  }
  return "This comparison could not be read. Reload the page to try again.";
}

function legend() {
  return Object.entries(ORIGINS).map(([origin, [name, why]]) =>
    h("li", {}, h("span", { class: `tok ${origin}` }, name), h("small", {}, why)));
}

export function mount(element, trigger, props, watch) {
  const stage = new Stage(element, trigger);
  watch("value", () => stage.open(props.value));
  if (props.value && props.value.comparison) stage.open(props.value);
}
