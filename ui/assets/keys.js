// Keyboard: Esc stops, Ctrl+Enter sends from anywhere; and the settings button of narrow screens.

const button = (id) => document.querySelector(`#${id} button, button#${id}`);

document.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  const closesList = event.target.getAttribute?.("aria-expanded") === "true";
  if (event.key === "Escape" && !closesList && document.body.hasAttribute("data-running")) button("stop")?.click();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    button("send")?.click();
  }
}, true);

// Enter that ends an input method's composition chooses a character; it must not send.
document.addEventListener("keydown", (event) => { if (event.isComposing && event.key === "Enter") event.stopPropagation(); }, true);

document.addEventListener("click", (event) => {
  if (event.target.closest("#settings-toggle")) document.body.toggleAttribute("data-settings");
});
