// Figures as people read them. An undefined figure is "n/a", never 0.

const missing = (value) => value === null || value === undefined || Number.isNaN(value);

export const rate = (value) => (missing(value) ? "n/a" : value >= 100 ? value.toFixed(0) : value.toFixed(1));
export const percent = (value) => (missing(value) ? "n/a" : `${(value * 100).toFixed(value === 1 ? 0 : 1)}%`);
export const decimal = (value) => (missing(value) ? "n/a" : value.toFixed(2));
export const count = (value) => (missing(value) ? "n/a" : String(value));
export const milliseconds = (value) => (missing(value) ? "n/a" : `${value.toFixed(1)} ms`);
export const ratio = (value) => (missing(value) ? "n/a" : `${value.toFixed(2)}×`);

export function seconds(value) {
  if (missing(value)) return "n/a";
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 100) return `${value.toFixed(2)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export function bytes(value) {
  if (missing(value)) return "n/a";
  if (value < 1e6) return `${(value / 1e3).toFixed(0)} kB`;
  return value < 1e9 ? `${(value / 1e6).toFixed(0)} MB` : `${(value / 1e9).toFixed(1)} GB`;
}

export function parameters(value) {
  if (missing(value)) return "n/a";
  return value < 1e9 ? `${(value / 1e6).toFixed(1)} M` : `${(value / 1e9).toFixed(1)} B`;
}

export function visible(text) {
  if (text === "") return "(no text yet: part of a character or of a possible stop string)";
  return text.replace(/ /g, "␣").replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/\r/g, "␍");
}

export function when(unixSeconds) {
  const date = new Date(unixSeconds * 1000);
  return date.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
}

export function settingsLine(settings) {
  const shape = settings.fan_out === "list" ? `fan-out ${settings.fan_out_list.join(",")}` : `${settings.fan_out} fan-out, budget ${settings.budget}`;
  const rule = settings.rule === "rejection" ? "rejection sampling" : "shared noise";
  const parts = [`K ${settings.lookahead}`, shape, `temperature ${settings.temperature}`, rule, `seed ${settings.seed}`, `at most ${settings.max_new_tokens} tokens`, `fallback ${settings.fallback}`];
  if (settings.top_k) parts.push(`top-k ${settings.top_k}`);
  if (settings.top_p !== 1) parts.push(`top-p ${settings.top_p}`);
  if (settings.rule === "rejection" && settings.saguaro_c !== 1) parts.push(`C ${settings.saguaro_c}`);
  if (settings.stop && settings.stop.length) parts.push(`stop ${settings.stop.map((s) => JSON.stringify(s)).join(" ")}`);
  if (settings.system_prompt) parts.push("with system prompt");
  return parts.join(" · ");
}
