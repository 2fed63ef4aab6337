// Anthropic's client for Node: anthropic_node.mjs URL
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { CALL, HELLO, THOUGHT, run, weather } from "./say.mjs";

const require = createRequire(process.env.CLIENT_MODULES + "/");
const Anthropic = require("@anthropic-ai/sdk").Anthropic ?? require("@anthropic-ai/sdk");
const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const ask = { model: "toy", max_tokens: 2000 }, user = (content) => [{ role: "user", content }];
const tools = [weather("input_schema")];

await run({
  async wholeAndStreamed() {
    const whole = await client.messages.create({ ...ask, messages: user("hello") });
    assert.equal(whole.content[0].thinking, THOUGHT);
    assert.equal(whole.content[1].text, HELLO);
    const final = await client.messages.stream({ ...ask, messages: user("hello") }).finalMessage();
    assert.equal(final.content[1].text, HELLO);
    assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
  },
  async toolLoop() {
    const stream = client.messages.stream({ ...ask, messages: user(CALL), tools });
    const first = await stream.finalMessage();
    assert.equal(first.stop_reason, "tool_use");
    const call = first.content.find((block) => block.type === "tool_use");
    assert.deepEqual(call.input, { city: "Oslo" });
    const second = await client.messages.create({
      ...ask, tools, messages: [...user(CALL), { role: "assistant", content: first.content },
        { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "7 degrees" }] }],
    });
    assert.equal(second.content.at(-1).text, "The tool says: 7 degrees");
  },
  async errors() {
    await assert.rejects(client.messages.create({ ...ask, model: "other", messages: user("x") }), { status: 404 });
  },
  async cancelling() {
    const stream = client.messages.stream({ ...ask, messages: user("count") });
    for await (const _ of stream) break;
    stream.abort();
  },
});
