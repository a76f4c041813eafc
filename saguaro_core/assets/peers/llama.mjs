// llama.cpp through node-llama-cpp: reads a job as JSON from standard input, writes its output as JSON.
// The shapes of both are in saguaro_core/peers/protocol.py.
import {readFileSync} from "node:fs";
import path from "node:path";
import {pathToFileURL} from "node:url";

const job = JSON.parse(readFileSync(0, "utf8"));
const longestPrompt = Math.max(job.warm_up.length, ...job.prompts.map((prompt) => prompt.length));
const contextLength = longestPrompt + Math.max(job.max_new_tokens, job.warm_up_tokens);

async function importBinding() {
    const folder = path.join(job.module_folder, "node_modules", "node-llama-cpp");
    const {main} = JSON.parse(readFileSync(path.join(folder, "package.json"), "utf8"));
    return import(pathToFileURL(path.join(folder, main)));
}

async function answer(sequence, prompt, maxNewTokens) {
    await sequence.clearHistory();
    const start = performance.now();
    const tokenIds = [];
    const times = [];
    for await (const token of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
        tokenIds.push(token);
        times.push((performance.now() - start) / 1000);
        if (job.eos_token_ids.includes(token) || tokenIds.length === maxNewTokens)
            break;
    }
    return {token_ids: tokenIds, times};
}

async function decode(binding, model, {options}) {
    const context = await model.createContext({
        contextSize: contextLength,
        threads: job.cores.length,
        flashAttention: options.flash_attention === true,
        ignoreMemorySafetyChecks: true
    });
    const lookup = job.peer === "llama-lookup"
        ? {tokenPredictor: new binding.InputLookupTokenPredictor({predictionLength: {max: options.lookup_tokens}})}
        : {};
    const sequence = context.getSequence(lookup);
    await answer(sequence, job.warm_up, job.warm_up_tokens);
    const answers = [];
    for (const prompt of job.prompts)
        answers.push(await answer(sequence, prompt, job.max_new_tokens));
    await context.dispose();
    return {answers};
}

// resourceUsage() starts from what the parent held; the kernel's own figure does not.
function peakMemoryBytes() {
    try {
        return 1024 * Number(/VmHWM:\s+(\d+)/.exec(readFileSync("/proc/self/status", "utf8"))[1]);
    } catch {
        return 1024 * process.resourceUsage().maxRSS;
    }
}

const binding = await importBinding();
const llama = await binding.getLlama(
    {gpu: false, build: "never", skipDownload: true, maxThreads: 0, logLevel: "error", progressLogs: false}
);
const model = await llama.loadModel({modelPath: job.model_file});
const results = [];
for (const variant of job.variants) {
    try {
        results.push(await decode(binding, model, variant));
    } catch (error) {
        results.push({error: String(error.message ?? error)});
    }
}
process.stdout.write(JSON.stringify({results, peak_memory_bytes: peakMemoryBytes()}) + "\n");
await llama.dispose();
