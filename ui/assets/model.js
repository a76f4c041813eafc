// What is loaded where, and how far loading has come.
import { h } from "/ui/dom.js";
import { bytes, count, parameters } from "/ui/format.js";
import { describe, onStatus } from "/ui/status.js";

function rows(pairs) {
  return h("dl", {}, ...pairs.filter(([, value]) => value).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

function model(role, info) {
  return h("section", { class: "card" }, h("h3", {}, role), h("p", { class: "card-name" }, info.name),
    rows([["device", info.device], ["weights", `${parameters(info.num_parameters)} parameters, ${info.dtype}, ${bytes(info.memory_bytes)}`],
      ["vocabulary", count(info.vocabulary_size)], ["context", `${info.context_length} tokens`], ["revision", info.revision], ["note", info.note]]));
}

function missingDraft(info) {
  return h("section", { class: "card bad" }, h("h3", {}, "Draft"), h("p", { class: "card-name" }, "not loaded"),
    h("p", {}, info.draft_error ?? "No draft was asked for."),
    h("p", {}, "AR works without a draft. SD and SSD need one, and say so in their lanes until the program is started with a draft that fits the target (--draft)."));
}

function devices(info) {
  return info.draft ? `${info.num_devices} at work under SSD` : "the target's alone at work: SSD needs a draft";
}

function machine(info) {
  const versions = Object.entries(info.versions).map(([name, version]) => `${name} ${version}`).join(", ");
  return h("section", { class: "card" }, h("h3", {}, "Machine"), h("p", { class: "card-name" }, info.hardware),
    rows([["devices", devices(info)], ["context", `${info.context_length} tokens for prompt and answer`], ["versions", versions]]),
    ...info.notes.map((note) => h("p", { class: "card-note" }, note)));
}

export function mount(element) {
  const box = element.querySelector(".model");
  onStatus((status) => {
    const bar = h("progress", { max: "1", "aria-label": "Load progress" });
    if (status.progress !== null && status.progress !== undefined) bar.value = status.progress;
    const loading = status.state === "starting" || status.state === "loading";
    const line = h("p", { class: "model-state", "data-state": status.state, role: "status" }, describe(status));
    const info = status.info;
    const cards = info ? [model("Target", info.target), info.draft ? model("Draft", info.draft) : missingDraft(info), machine(info)] : [];
    box.replaceChildren(line, ...(loading ? [bar] : []), h("div", { class: "cards" }, ...cards));
  });
}
