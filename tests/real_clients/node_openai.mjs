// OpenAI's SDK for Node.
import OpenAI from 'openai'
import { zodResponseFormat } from 'openai/helpers/zod'
import { z } from 'zod'
import { run } from './outcomes.mjs'

await run(['openai'], ({ url, key, model, picture }) => {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 })
  const chat = (content, more = {}) =>
    client.chat.completions.create({ model, max_completion_tokens: 8, messages: [{ role: 'user', content }], ...more })
  const image = [{ type: 'text', text: 'What is this?' }, { type: 'image_url', image_url: { url: picture } }]
  const parameters = { type: 'object', properties: { city: { enum: ['Rome', 'Oslo'] } }, required: ['city'] }
  return Object.entries({
    models: async () => (await client.models.list()).data.map((each) => each.id),
    text: async () => (await chat('Hello')).choices[0].message.content,
    stream: async () => {
      const parts = []
      for await (const event of await chat('Hello', { stream: true })) parts.push(event.choices[0]?.delta.content ?? '')
      return parts.join('')
    },
    picture: async () => (await chat(image)).choices[0].message.content,
    object: async () => {
      const format = zodResponseFormat(z.object({ colour: z.enum(['red', 'blue']) }), 'colour')
      const messages = [{ role: 'user', content: 'A colour' }]
      return (await client.chat.completions.parse({ model, messages, response_format: format, max_tokens: 64 })).choices[0].message.parsed
    },
    tool: async () => {
      const tools = [{ type: 'function', function: { name: 'weather', parameters, strict: true } }]
      const tool_choice = { type: 'function', function: { name: 'weather' } }
      const made = await chat('Weather?', { tools, tool_choice, max_completion_tokens: 512 })
      return JSON.parse(made.choices[0].message.tool_calls[0].function.arguments)
    },
    responses: async () => (await client.responses.create({ model, input: 'Hello', max_output_tokens: 8 })).output_text,
    response_with_a_picture: async () => {
      const content = [{ type: 'input_text', text: 'What is this?' }, { type: 'input_image', image_url: picture, detail: 'auto' }]
      return (await client.responses.create({ model, input: [{ role: 'user', content }], max_output_tokens: 8 })).output_text
    },
    stopped: async () => {
      const events = await chat('Hello', { stream: true, max_completion_tokens: 200 })
      for await (const event of events) if (event) break
      return events.controller.signal.aborted
    },
  })
})
