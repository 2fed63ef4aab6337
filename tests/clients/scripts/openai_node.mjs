// The official OpenAI client for Node: openai_node.mjs URL
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { CALL, HELLO, THOUGHT, run, weather } from "./say.mjs";

const require = createRequire(process.env.CLIENT_MODULES + "/");
const OpenAI = require("openai").OpenAI ?? require("openai");
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
const model = "toy", user = (content) => [{ role: "user", content }];
const tools = [{ type: "function", function: weather("parameters") }];
const flat = [{ type: "function", ...weather("parameters") }];

await run({
  async chatWholeAndStreamed() {
    const whole = await client.chat.completions.create({ model, messages: user("hello") });
    assert.equal(whole.choices[0].message.content, HELLO);
    assert.equal(whole.choices[0].message.reasoning_content, THOUGHT);
    let text = "";
    for await (const chunk of await client.chat.completions.create({ model, messages: user("hello"), stream: true }))
      text += chunk.choices[0]?.delta?.content ?? "";
    assert.equal(text, HELLO);
  },
  async chatToolLoop() {
    const runner = client.chat.completions.runTools({
      model, messages: user(CALL),
      tools: [{ type: "function", function: { ...weather("parameters"), parse: JSON.parse, function: ({ city }) => `${city}: 7 degrees` } }],
    });
    assert.equal(await runner.finalContent(), "The tool says: Oslo: 7 degrees");
    const stream = client.chat.completions.stream({ model, messages: user(`${CALL} and ${CALL}`), tools });
    const final = await stream.finalChatCompletion();
    assert.equal(final.choices[0].finish_reason, "tool_calls");
    assert.deepEqual(final.choices[0].message.tool_calls.map((each) => JSON.parse(each.function.arguments)), [{ city: "Oslo" }, { city: "Oslo" }]);
  },
  async responses() {
    const whole = await client.responses.create({ model, input: "hello" });
    assert.equal(whole.output_text, HELLO);
    let last = -1, text = "";
    for await (const event of await client.responses.create({ model, input: "hello", stream: true })) {
      assert.equal(event.sequence_number, ++last);
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    assert.equal(text, HELLO);
    const stream = client.responses.stream({ model, input: CALL, tools: flat });
    const first = await stream.finalResponse();
    const call = first.output.find((item) => item.type === "function_call");
    assert.deepEqual(JSON.parse(call.arguments), { city: "Oslo" });
    const second = await client.responses.create({
      model, tools: flat, previous_response_id: first.id,
      input: [{ type: "function_call_output", call_id: call.call_id, output: "7 degrees" }],
    });
    assert.equal(second.output_text, "The tool says: 7 degrees");
  },
  async json() {
    const whole = await client.chat.completions.create({ model, messages: user("Ada as JSON"), response_format: { type: "json_object" } });
    assert.deepEqual(JSON.parse(whole.choices[0].message.content), { name: "Ada", age: 36 });
  },
  async errors() {
    await assert.rejects(client.chat.completions.create({ model, messages: user("x"), temperature: 9 }), { status: 400, param: "temperature" });
    await assert.rejects(client.chat.completions.create({ model: "other", messages: user("x") }), { status: 404, code: "model_not_found" });
  },
  async cancelling() {
    const stream = await client.chat.completions.create({ model, messages: user("count"), stream: true });
    for await (const _ of stream) break;
    stream.controller.abort();
  },
});
