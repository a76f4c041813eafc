// The engine's status, asked for often while it loads and seldom afterwards; all panels share one poll.

const listeners = new Set();
let latest = null;
let timer = null;

async function poll() {
  clearTimeout(timer);
  try {
    const response = await fetch("/api/status", { cache: "no-store" });
    latest = response.ok ? await response.json() : { state: "unreachable", message: `The server answered ${response.status}.` };
  } catch {
    latest = { state: "unreachable", message: "The server does not answer. Is it still running?" };
  }
  listeners.forEach((listener) => listener(latest));
  const settled = latest.state === "ready" || latest.state === "failed" || latest.state === "closed";
  if (!document.hidden) timer = setTimeout(poll, settled ? 15000 : 700);
}

document.addEventListener("visibilitychange", () => { if (!document.hidden && listeners.size) poll(); });

export function refreshStatus() {
  if (listeners.size) poll();
}

export function onStatus(listener) {
  listeners.add(listener);
  if (latest) listener(latest);
  else if (listeners.size === 1) poll();
}

export function describe(status) {
  const progress = status.progress !== null && status.progress !== undefined && status.state === "loading" ? ` ${Math.round(status.progress * 100)}%` : "";
  if (status.state === "ready") return status.info && status.info.draft ? "Ready" : "Ready, AR only";
  return `${status.message}${progress}`;
}
