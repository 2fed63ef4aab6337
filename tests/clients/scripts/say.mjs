// What the scripted model is told and says, and how a script reports.
export const HELLO = "Hello! 😀 How can I help you today?";
export const THOUGHT = "The user wants something.";
export const CALL = 'call weather with {"city": "Oslo"}';

export const weather = (schema) => ({
  name: "weather",
  description: "the weather of a city",
  [schema]: { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false },
});

export async function run(scenarios) {
  for (const [name, scenario] of Object.entries(scenarios)) {
    await scenario();
    console.log("ok", name);
  }
  console.log("all ok");
}
