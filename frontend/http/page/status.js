// Draws what /mmrouter/* and /metrics say, every two seconds. What workers and clients named is
// only ever put in as text.
"use strict";

const PERIOD_MS = 2000;
const STEP_S = 10;
const STEPS = 36;
const SHOWN = 30;

const find = (id) => document.getElementById(id);
let key = sessionStorage.getItem("mmrouter-admin-key") || "";
let firstTokens = [];
let timer = 0;

function make(name, text = "", className = "") {
  const element = document.createElement(name);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}

function row(cells) {
  const line = make("tr");
  for (const cell of cells) {
    const held = make("td");
    held.append(cell);
    line.append(held);
  }
  return line;
}

async function get(path) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(path, { headers, cache: "no-store", credentials: "omit" });
  if (!answer.ok) {
    const error = new Error(`${path} answers ${answer.status}`);
    error.refused = answer.status === 401 || answer.status === 403;
    throw error;
  }
  return answer;
}

async function manage(worker, action) {
  try {
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const path = `mmrouter/workers/${encodeURIComponent(worker)}/${action}`;
    const answer = await fetch(path, { method: "POST", headers, credentials: "omit" });
    if (!answer.ok) throw new Error(`${action} of ${worker} answers ${answer.status}`);
    update();
  } catch (error) {
    say(error.message, true);
  }
}

function buttons(worker) {
  const out = worker.drained || worker.circuit !== "closed";
  const held = make("span");
  for (const action of out ? ["reinstate"] : ["drain", "eject"]) {
    const button = make("button", action);
    button.dataset.key = `${worker.worker_id} ${action}`;
    button.setAttribute("aria-label", `${action} ${worker.worker_id}`);
    button.addEventListener("click", () => manage(worker.worker_id, action));
    held.append(button, " ");
  }
  return held;
}

const json = async (path) => (await get(path)).json();

function circuit(worker) {
  if (!worker.connected) return make("span", "not connected", "bad");
  if (worker.drained) return make("span", "drained", "warn");
  const kind = { closed: "good", "half-open": "warn" }[worker.circuit] || "bad";
  const reason = worker.circuit_reason ? `: ${worker.circuit_reason}` : "";
  return make("span", worker.circuit + reason, kind);
}

function index(rank) {
  const shown = make("span", rank.index, rank.index === "exact" ? "good" : "warn");
  shown.title = rank.reason;
  return shown;
}

function meter(share) {
  if (share === null) return make("span", "–", "quiet");
  const element = make("meter");
  element.value = share;
  element.title = `${Math.round(share * 100)} %`;
  return element;
}

const number = (value) => (value === null ? "–" : value.toLocaleString("en"));

function drawWorkers(workers, refused) {
  const rows = workers.flatMap((worker) =>
    worker.ranks.map((rank, place) => {
      const name = make("span", place ? "" : worker.worker_id);
      if (!place && worker.state !== "ready") name.append(make("span", ` ${worker.state}`, "warn"));
      const line = row([
        name, place ? "" : circuit(worker), place ? "" : worker.transport || "–",
        String(rank.rank), index(rank), number(rank.blocks),
        number(rank.own.requests), number(rank.others.requests),
        number(rank.running), number(rank.waiting), meter(rank.kv_usage), place ? "" : buttons(worker),
      ]);
      line.dataset.worker = worker.worker_id;
      return line;
    }),
  );
  const focused = document.activeElement.dataset.key;
  find("workers").tBodies[0].replaceChildren(...rows);
  if (focused) document.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  find("refused").replaceChildren(
    ...refused.map((one) => make("li", `${one.worker_id} is refused: ${one.reason}`, "bad")),
  );
}

// The sum over all label sets of a metric, and by one label.
function samples(text, name) {
  const found = [];
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z0-9_:]+)(\{.*\})? ([^ ]+)/.exec(line);
    if (match && match[1] === name) {
      const labels = Object.fromEntries(
        [...(match[2] || "").matchAll(/([a-zA-Z0-9_]+)="((?:[^"\\]|\\.)*)"/g)].map(
          (one) => [one[1], one[2]],
        ),
      );
      found.push({ labels, value: Number(match[3]) });
    }
  }
  return found;
}

const total = (found) => found.reduce((sum, one) => sum + one.value, 0);

function by(found, ...names) {
  const sums = new Map();
  for (const { labels, value } of found) {
    const name = names.map((each) => labels[each]).join(" ");
    sums.set(name, (sums.get(name) || 0) + value);
  }
  return [...sums].filter(([, value]) => value);
}

const bytes = (value) =>
  value < 1e6 ? `${(value / 1e3).toFixed(1)} kB`
  : value < 1e9 ? `${(value / 1e6).toFixed(1)} MB` : `${(value / 1e9).toFixed(2)} GB`;

function drawMedia(text) {
  const list = (found, show) =>
    found.map(([name, value]) => `${name} ${show(value)}`).join(", ") || "nothing yet";
  const facts = {
    Arena: `${bytes(total(samples(text, "mmrouter_arena_bytes_used")))} in use, ` +
      `${number(total(samples(text, "mmrouter_arena_leases")))} leases`,
    "Bytes sent by": list(
      by(samples(text, "mmrouter_tensor_bytes_sent_total"), "transport"), bytes,
    ),
    "Items by way": list(by(samples(text, "mmrouter_media_items_total"), "how"), number),
    "Fell back": list(
      by(samples(text, "mmrouter_transfer_fallbacks_total"), "reason"), number,
    ),
  };
  find("media").replaceChildren(
    ...Object.entries(facts).flatMap(([name, fact]) => [make("dt", name), make("dd", fact)]),
  );
}

// Lines over the last six minutes; null where there is nothing to say.
function plot(title, latest, ...lines) {
  const figure = make("figure");
  const caption = make("figcaption");
  caption.append(make("span", title, "quiet"), make("strong", latest));
  const space = "http://www.w3.org/2000/svg";
  const drawing = document.createElementNS(space, "svg");
  drawing.setAttribute("viewBox", `0 0 ${STEPS - 1} 1`);
  drawing.setAttribute("preserveAspectRatio", "none");
  drawing.setAttribute("role", "img");
  drawing.setAttribute("aria-label", `${title}: ${latest}`);
  const most = Math.max(1e-9, ...lines.flat().filter((value) => value !== null));
  lines.forEach((values, place) => {
    const points = values
      .map((value, step) => (value === null ? "" : `${step},${1 - (0.95 * value) / most}`))
      .join(" ");
    const line = document.createElementNS(space, "polyline");
    line.setAttribute("points", points);
    if (place) line.setAttribute("class", "second");
    drawing.append(line);
  });
  figure.append(caption, drawing);
  return figure;
}

function last(values, show) {
  const value = values.findLast((one) => one !== null);
  return value === undefined ? "–" : show(value);
}

function drawPlots(decisions, text) {
  const now = Date.now() / 1000;
  const steps = Array.from({ length: STEPS }, () => ({
    count: 0, ended: 0, prompt: 0, predicted: 0, realised: 0,
  }));
  for (const one of decisions) {
    const step = steps[STEPS - 1 - Math.floor((now - one.time) / STEP_S)];
    if (!step) continue;
    step.count += 1;
    if (one.realised_cached_tokens === null) continue;
    step.ended += 1;
    step.prompt += one.prompt_tokens;
    step.predicted += one.predicted_cached_tokens;
    step.realised += one.realised_cached_tokens;
  }
  const rates = steps.map((step) => step.count / STEP_S);
  const share = (name) => steps.map((step) => (step.prompt ? step[name] / step.prompt : null));
  const percent = (value) => `${Math.round(100 * value)} %`;

  const name = "mmrouter_time_to_first_token_seconds";
  firstTokens.push({
    time: now,
    sum: total(samples(text, `${name}_sum`)),
    count: total(samples(text, `${name}_count`)),
  });
  firstTokens = firstTokens.filter((one) => now - one.time < (STEPS + 1) * STEP_S);
  const waits = steps.map((_, place) => {
    const end = now - (STEPS - 1 - place) * STEP_S;
    const within = firstTokens.filter((one) => one.time <= end && one.time > end - STEP_S - 2);
    const [first, final] = [within[0], within.at(-1)];
    const count = first ? final.count - first.count : 0;
    return count > 0 ? (final.sum - first.sum) / count : null;
  });
  find("plots").replaceChildren(
    plot("Requests per second", last(rates, (value) => value.toFixed(1)), rates),
    plot("Prompt tokens cached, realised", last(share("realised"), percent), share("realised")),
    plot("… as predicted", last(share("predicted"), percent), share("predicted")),
    plot("First token, mean", last(waits, (value) => `${Math.round(1000 * value)} ms`), waits),
  );
}

function bar(candidate, most) {
  const parts = {
    prefill: candidate.prefill_tokens, encode: candidate.media_tokens,
    queued: candidate.queued_prefill_tokens, decode: candidate.decode_tokens,
  };
  const element = make("div", "", "bar");
  for (const [name, tokens] of Object.entries(parts)) {
    const part = make("i", "", name);
    part.style.width = `${(100 * tokens) / most}%`;
    part.title = `${name}: ${number(tokens)} tokens`;
    element.append(part);
  }
  return element;
}

function candidates(decision) {
  const weight = (one) =>
    one.prefill_tokens + one.media_tokens + one.queued_prefill_tokens + one.decode_tokens;
  const most = Math.max(1, ...decision.candidates.map(weight));
  const table = make("table");
  for (const one of decision.candidates) {
    const line = row([
      `${one.worker_id} / ${one.rank}`, `cost ${number(Math.round(one.cost))}`,
      `${number(one.overlap_blocks)} blocks held`, bar(one, most),
    ]);
    if (one.worker_id === decision.worker_id && one.rank === decision.rank) {
      line.className = "chosen";
    }
    table.append(line);
  }
  return table;
}

const id = (one) => `${one.time} ${one.request_id} ${one.process || ""}`;

function drawDecisions(decisions) {
  const open = new Set(
    [...find("decisions").querySelectorAll("details[open]")].map((one) => one.dataset.id),
  );
  find("decisions").replaceChildren(
    ...decisions.slice(0, SHOWN).map((one) => {
      const details = make("details");
      details.dataset.id = id(one);
      details.dataset.request = one.request_id;
      const realised =
        one.realised_cached_tokens === null ? "not known yet" : number(one.realised_cached_tokens);
      details.append(make(
        "summary",
        `${new Date(one.time * 1000).toLocaleTimeString()} to ${one.worker_id} / ${one.rank} ` +
          `(${one.reason}): ${number(one.prompt_tokens)} tokens, cached ` +
          `${number(one.predicted_cached_tokens)} predicted, ${realised} realised`,
      ));
      details.open = open.has(details.dataset.id);
      const fill = () => {
        if (details.childElementCount > 1) return;
        const media = one.media.map(
          (item) => `${item.how} ${item.transport} ${item.nbytes ? bytes(item.nbytes) : ""}`,
        );
        details.append(
          make("p", `${one.request_id}, decided in ${Math.round(one.micros)} µs among ` +
            `${one.candidates_total} by ${one.mode}`, "quiet"),
          make("p", `Media: ${media.join(", ") || "none"}`, "quiet"),
          candidates(one),
        );
      };
      if (details.open) fill();
      details.addEventListener("toggle", fill);
      return details;
    }),
  );
}

function say(text, bad) {
  find("state").textContent = text;
  find("state").className = bad ? "bad" : "";
}

async function update() {
  try {
    const [workers, refused, known, decisions, metrics] = await Promise.all([
      json("mmrouter/workers"), json("mmrouter/workers/refused"), json("mmrouter/index"),
      json("mmrouter/decisions?last=1000"), get("metrics").then((answer) => answer.text()),
    ]);
    drawWorkers(workers, refused);
    drawPlots(decisions, metrics);
    drawMedia(metrics);
    drawDecisions(decisions);
    const lost = workers.filter((one) => !one.connected).length;
    say(
      `${workers.length} workers` + (lost ? `, ${lost} not connected` : "") +
        `; ${number(known.blocks)} blocks, ${Math.round(100 * known.exact_share)} % known exactly`,
      lost > 0,
    );
    find("content").hidden = false;
  } catch (error) {
    if (error.refused) {
      // Nothing that was shown to whoever had a key stays.
      find("content").hidden = true;
      for (const place of ["plots", "media", "decisions", "refused"]) {
        find(place).replaceChildren();
      }
      find("workers").tBodies[0].replaceChildren();
      say("This needs a key of --admin-key-file.", true);
    } else {
      say(`No answer: ${error.message}. What is shown is old.`, true);
    }
  }
  clearTimeout(timer);
  timer = setTimeout(update, PERIOD_MS);
}

find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = find("key").value.trim();
  find("key").value = "";
  sessionStorage.setItem("mmrouter-admin-key", key);
  update();
});

update();
