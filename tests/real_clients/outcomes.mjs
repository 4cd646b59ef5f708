// What came of each call, as tests/e2e/clients/programs/outcomes.py says it.
import { readFileSync } from 'node:fs'

export async function run(packages, callsOf) {
  const at = JSON.parse(readFileSync(0, 'utf8')).ours
  const outcomes = {}
  for (const [name, call] of callsOf(at)) {
    try {
      outcomes[name] = { answer: await call() }
    } catch (error) {
      outcomes[name] = { raised: error.name, message: String(error.message).slice(0, 300) }
    }
  }
  const version = (name) => JSON.parse(readFileSync(`node_modules/${name}/package.json`)).version
  console.log(JSON.stringify({ versions: Object.fromEntries(packages.map((name) => [name, version(name)])), outcomes: { ours: outcomes } }))
}
