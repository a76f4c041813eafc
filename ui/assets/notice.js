// One line for what the user should know about the last action, or about the engine.
import { h, setText } from "/ui/dom.js";
import { describe, onStatus } from "/ui/status.js";

export function mount(element, trigger, props, watch) {
  const action = h("p", { class: "notice", role: "alert" });
  const engine = h("p", { class: "notice", role: "status" });
  element.querySelector(".notices").append(engine, action);
  const show = () => {
    const value = props.value || {};
    setText(action, value.text || "");
    action.dataset.kind = value.kind || "error";
  };
  watch("value", show);
  show();
  onStatus((status) => {
    const draftError = status.info && !status.info.draft ? `No draft model is loaded, so SD and SSD cannot run: ${status.info.draft_error}` : "";
    const bad = status.state === "failed" || status.state === "unreachable" || status.state === "closed";
    const loading = status.state === "starting" || status.state === "loading";
    engine.dataset.kind = bad ? "error" : "info";
    const lines = status.log_problem ? [`Answers are not being stored: ${status.log_problem}`] : [];
    const line = bad ? status.message : loading ? `The models are loading: ${describe(status)}. You can write your prompt meanwhile.` : draftError;
    setText(engine, [line, ...lines].filter(Boolean).join("\n"));
  });
}
