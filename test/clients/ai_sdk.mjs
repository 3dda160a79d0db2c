// One call of the AI SDK: node ai_sdk.mjs NODE_MODULES URL PROVIDER CASE MODEL. Prints what came of it as JSON.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, url, provider, wanted, model] = process.argv.slice(2);
const require = createRequire(pathToFileURL(`${folder}/`));
const load = async (name) => await import(pathToFileURL(require.resolve(name)));
const { generateText, streamText, Output, tool, stepCountIs } = await load("ai");
const { z } = await load("zod");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createAnthropic } = await load("@ai-sdk/anthropic");

const apiKey = "unused";
const baseURL = `${url}/v1`;
const providers = {
  openai: () => createOpenAI({ baseURL, apiKey })(model),
  compatible: () =>
    createOpenAICompatible({ name: "rwkv", baseURL, apiKey, supportsStructuredOutputs: true })(model),
  anthropic: () => createAnthropic({ baseURL, apiKey })(model),
};
const asked = { model: providers[provider](), temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
const said = (content) => ({ role: "user", content });

const cases = {
  chat: async () => (await generateText({ ...asked, prompt: "What is the capital of France?" })).text,
  stream: async () => {
    const parts = [];
    for await (const part of streamText({ ...asked, prompt: "What is the capital of France?" }).textStream) {
      parts.push(part);
    }
    return parts;
  },
  tool: async () => {
    const cities = [];
    const get_weather = tool({
      description: "The weather in a city",
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => (cities.push(city), "sunny, 22 degrees"),
    });
    const prompt = "What is the weather in Paris?";
    const { text } = await generateText({ ...asked, prompt, tools: { get_weather }, stopWhen: stepCountIs(2) });
    return { cities, text };
  },
  object: async () => {
    const schema = z.object({ city: z.enum(["Paris", "London"]) });
    const prompt = "What is the capital of France?";
    return (await generateText({ ...asked, prompt, output: Output.object({ schema }) })).output;
  },
  toolThenObject: async () => {
    const cities = [];
    const get_weather = tool({
      description: "The weather in a city",
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => (cities.push(city), "sunny, 22 degrees"),
    });
    const schema = z.object({ sky: z.enum(["sunny", "cloudy"]) });
    const prompt = "What is the weather in Paris?";
    // Without it the provider asks for the object as a tool of which any is demanded, and the model must choose.
    const providerOptions = { anthropic: { structuredOutputMode: "outputFormat" } };
    const both = { providerOptions, tools: { get_weather }, stopWhen: stepCountIs(4), output: Output.object({ schema }) };
    return { cities, object: (await generateText({ ...asked, prompt, ...both })).output };
  },
  turn: async () => {
    const first = [said("My name is Alice.")];
    const { responseMessages, response } = await generateText({ ...asked, messages: first });
    const messages = [...first, ...(responseMessages ?? response.messages), said("What is my name?")];
    return (await generateText({ ...asked, messages })).text;
  },
  error: async () => {
    try {
      await generateText({ ...asked, prompt: "Hi" });
    } catch (error) {
      return { status: error.statusCode, message: error.message };
    }
    return null;
  },
};
console.log(JSON.stringify(await cases[wanted]()));
