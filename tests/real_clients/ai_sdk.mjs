// The Vercel AI SDK: its OpenAI provider (Responses, which is its default, and chat), and the one
// for servers that are compatible with OpenAI.
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateText, Output, stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'
import { run } from './outcomes.mjs'

const PARTS = { maxOutputTokens: 8, temperature: 0, maxRetries: 0 }

function providers({ url, key }) {
  const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: key })
  const compatible = createOpenAICompatible({
    name: 'mmrouter', baseURL: `${url}/v1`, apiKey: key, supportsStructuredOutputs: true, includeUsage: true,
  })
  return { responses: openai, chat: openai.chat, compatible }
}

const weather = tool({
  description: 'The weather of a city',
  inputSchema: z.object({ city: z.enum(['Rome', 'Oslo']) }),
  strict: true,
  execute: async ({ city }) => `rain in ${city}`,
})

const cases = {
  text: async (model) => (await generateText({ model, prompt: 'Hello', ...PARTS })).text,
  stream: async (model) => {
    const parts = []
    const { textStream, usage } = streamText({ model, prompt: 'Hello', ...PARTS })
    for await (const part of textStream) parts.push(part)
    return { text: parts.join(''), tokens: (await usage).outputTokens }
  },
  picture: async (model, { picture }) =>
    (await generateText({ model, messages: [shown(picture)], ...PARTS })).text,
  picture_as_bytes: async (model, { picture }) =>
    (await generateText({ model, messages: [shown(Buffer.from(picture.split(',')[1], 'base64'))], ...PARTS })).text,
  two_turns: async (model) => {
    const messages = [{ role: 'user', content: 'Hello' }]
    const first = await generateText({ model, messages, ...PARTS })
    messages.push(...first.response.messages, { role: 'user', content: 'And now?' })
    return (await generateText({ model, messages, ...PARTS, providerOptions: { openai: { store: false } } })).text
  },
  object: async (model) => {
    const schema = z.object({ colour: z.enum(['red', 'blue']) })
    const made = await generateText({ model, prompt: 'A colour', output: Output.object({ schema }), ...PARTS, maxOutputTokens: 64 })
    return made.output
  },
  tool: async (model) => {
    const options = { tools: { weather }, toolChoice: { type: 'tool', toolName: 'weather' }, stopWhen: stepCountIs(1) }
    const made = await generateText({ model, prompt: 'Weather?', ...options, ...PARTS, maxOutputTokens: 512 })
    if (!made.toolResults.length) throw new Error(`no call, but ${made.text}`)
    return made.toolResults.map((each) => each.output)
  },
}

function shown(image) {
  return { role: 'user', content: [{ type: 'text', text: 'What is this?' }, { type: 'image', image }] }
}

await run(['ai', '@ai-sdk/openai', '@ai-sdk/openai-compatible'], (at) =>
  Object.entries(providers(at)).flatMap(([way, provider]) =>
    Object.entries(cases).map(([name, call]) => [`${way}: ${name}`, () => call(provider(at.model), at)])))
