// Draws what /mmrouter/* and /metrics say, every two seconds. What workers and clients named is
// only ever put in as text.
"use strict";

const PERIOD_MS = 2000;
const STEP_S = 10;
const STEPS = 90;
const SHOWN = 30;
const HOLD_MS = 10000;

const find = (id) => document.getElementById(id);
let key = sessionStorage.getItem("mmrouter-admin-key") || "";
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

async function post(path) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(path, { method: "POST", headers, credentials: "omit" });
  if (answer.ok) return;
  const told = await answer.json().catch(() => ({}));
  const reasons = (told.workers || []).map((one) => one.message).filter(Boolean);
  throw new Error(reasons.join("; ") || `${path} answers ${answer.status}`);
}

async function manage(worker, button, routes) {
  try {
    for (const route of routes) {
      say(`${button} ${worker} …`);
      await post(`mmrouter/workers/${encodeURIComponent(worker)}/${route}`);
    }
    update();
  } catch (error) {
    hold(`${button} ${worker}: ${error.message}`);
  }
}

// What each button asks for, one after the other.
const ROUTES = {
  "wake up": ["wake_up"],
  "reset caches": ["reset_prefix_cache", "reset_mm_cache"],
};

function buttons(worker) {
  const out = worker.drained || worker.circuit !== "closed";
  const condition = { paused: ["resume"], asleep: ["wake up"] }[worker.condition];
  const held = make("span");
  for (const name of [
    ...(out ? ["reinstate"] : ["drain", "eject"]),
    ...(condition || ["pause", "sleep"]), "reset caches",
  ]) {
    const button = make("button", name);
    button.dataset.key = `${worker.worker_id} ${name}`;
    button.setAttribute("aria-label", `${name} ${worker.worker_id}`);
    button.addEventListener("click", () => manage(worker.worker_id, name, ROUTES[name] || [name]));
    held.append(button, " ");
  }
  return held;
}

const json = async (path) => (await get(path)).json();

function circuit(worker) {
  if (!worker.connected) return make("span", "not connected", "bad");
  if (worker.drained) return make("span", "drained", "warn");
  if (worker.condition && worker.condition !== "serving") {
    return make("span", worker.condition, "warn");
  }
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
        place ? "" : number(worker.media), String(rank.rank), index(rank), number(rank.blocks),
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

// Lines over the last quarter of an hour; null where there is nothing to say.
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

function drawPlots(history) {
  // By the server's clock: the browser's may be minutes off.
  const end = Math.max(...history.map((one) => one.at), 0);
  const at = new Map(history.map((one) => [one.at, one]));
  const steps = Array.from({ length: STEPS }, (_, place) => at.get(end - (STEPS - 1 - place) * STEP_S));
  const rate = (name) => steps.map((step) => (step ? step[name] / STEP_S : null));
  const ratio = (name, of) => steps.map((step) => (step && step[of] ? step[name] / step[of] : null));
  const percent = (value) => `${Math.round(100 * value)} %`;
  const perSecond = (value) => value.toFixed(1);

  const realised = ratio("realised", "prompt_tokens");
  const waits = ratio("first_token_seconds", "first_tokens");
  find("plots").replaceChildren(
    plot("Requests per second", last(rate("requests"), perSecond), rate("requests")),
    plot("Output tokens per second", last(rate("output_tokens"), perSecond), rate("output_tokens")),
    plot(
      "Cached, and as predicted", last(realised, percent),
      realised, ratio("predicted", "prompt_tokens"),
    ),
    plot("First token, mean", last(waits, (value) => `${Math.round(1000 * value)} ms`), waits),
  );
}

function bar(candidate, most) {
  const element = make("div", "", "bar");
  for (const [name, cost] of Object.entries(candidate.costs)) {
    const part = make("i", "", name);
    part.style.width = `${(100 * cost) / most}%`;
    part.title = `${name}: ${number(Math.round(cost))}`;
    element.append(part);
  }
  return element;
}

function candidates(decision) {
  const most = Math.max(1, ...decision.candidates.map((one) => one.cost));
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

const milliseconds = (seconds) => `${Math.round(1000 * seconds)} ms`;

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
          `${number(one.predicted_cached_tokens)} predicted, ${realised} realised` +
          (one.first_token_s === null ? "" : `, first token ${milliseconds(one.first_token_s)}`),
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

function drawEvents(events) {
  find("events").tBodies[0].replaceChildren(
    ...events.slice(0, SHOWN).map((one) => row([
      new Date(one.at * 1000).toLocaleString(), one.worker_id, one.what, one.reason,
      one.process === undefined ? "" : `process ${one.process}`,
    ])),
  );
}

function say(text, bad) {
  find("state").textContent = text;
  find("state").className = bad ? "bad" : "";
}

// What went wrong with a button stays until the next one, or for some seconds.
let held = 0;

function hold(text) {
  say(text, true);
  held = Date.now() + HOLD_MS;
}

async function update() {
  try {
    const [workers, refused, known, events, history, decisions, metrics] = await Promise.all([
      json("mmrouter/workers"), json("mmrouter/workers/refused"), json("mmrouter/index"),
      json("mmrouter/events"),
      json("mmrouter/history"), json("mmrouter/decisions?last=30"),
      get("metrics").then((answer) => answer.text()),
    ]);
    drawWorkers(workers, refused);
    drawEvents(events);
    drawPlots(history);
    drawMedia(metrics);
    drawDecisions(decisions);
    const lost = workers.filter((one) => !one.connected).length;
    if (Date.now() > held) say(
      `${workers.length} worker${workers.length === 1 ? "" : "s"}` + (lost ? `, ${lost} not connected` : "") +
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
      find("events").tBodies[0].replaceChildren();
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
