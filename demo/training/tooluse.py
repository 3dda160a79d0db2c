"""Conversations with tools on offer: calls, answers from a tool's result, and questions that need no tool."""
import json
from dataclasses import dataclass
from random import Random

from demo.training.conversation import conversation, some_system
from demo.training.example import Example, held_out
from demo.training.memory import CITIES
from demo.training.questions import fact
from rwkv_batch.chat.templates import Message


@dataclass(frozen=True)
class Family:
    """Tools that do the same under other names. `{}` stands for what the user asks about."""

    names: tuple[str, ...]
    purposes: tuple[str, ...]
    arguments: tuple[str, ...]
    argument_purposes: tuple[str, ...]
    questions: tuple[str, ...]
    thought: str


CITY_PURPOSES = ("The city", "Name of the city", "City name", "The name of the city.", "City and country", "The city, e.g. Paris", "")
WEATHER = Family(
    ("get_weather", "get_weather", "get_current_weather", "weather", "lookup_weather", "fetch_weather", "weather_forecast"),
    ("Get the weather of a city", "Get current weather for a city", "Get the current weather in a given location", "Weather lookup", "Returns the weather.",
     "Get weather", "Get the weather for a city.", "Get the current weather", "Weather in a city.", ""),
    ("city", "city", "location", "place"), CITY_PURPOSES,
    ("What is the weather in {}?", "What's the weather in {}?", "How is the weather in {}?", "What is the weather like in {}?", "What's the weather like in {}?",
     "How is the weather in {} today?", "What's the weather like in {} today?", "Tell me the weather in {}.", "Is it sunny in {}?", "Weather in {}?",
     "what is the weather in {}", "What is the weather in {} today?", "How warm is it in {}?", "Please look up the weather in {}."),
    "I need the weather in {}.",
)
TIME = Family(
    ("get_time", "get_current_time", "current_time", "clock"),
    ("Get the time in a city", "Returns the local time of a city.", "Get the current time", "Current time in a city", ""),
    ("city", "city", "location", "place"), CITY_PURPOSES,
    ("What time is it in {}?", "What is the time in {}?", "Tell me the time in {}.", "What is the current time in {}?", "How late is it in {}?", "Time in {}?"),
    "I need the time in {}.",
)
CALCULATE = Family(
    ("calculate", "calculator", "calc", "evaluate"), ("Calculate an expression", "Evaluates a formula.", "Do math", "A calculator", ""),
    ("expression", "formula"), ("The expression", "What to calculate", "A formula", ""),
    ("What is {}?", "Calculate {}.", "Compute {}.", "How much is {}?", "Please calculate {}."),
    "I need to calculate {}.",
)
FAMILIES = (WEATHER, WEATHER, WEATHER, TIME, CALCULATE)
SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear")


@dataclass(frozen=True)
class Tool:
    """One offered tool: its OpenAI description and what it is for."""

    family: Family
    name: str
    argument: str
    spec: dict

    def call(self, subject: str) -> tuple[str, str]:
        """Name and arguments of a call, as an assistant's turn holds them."""
        return self.name, json.dumps({self.argument: subject}, ensure_ascii=False)


def draw_tool(rng: Random, family: Family) -> Tool:
    name, argument = rng.choice(family.names), rng.choice(family.arguments)
    prop: dict = {"type": "string"}
    if purpose := rng.choice(family.argument_purposes):
        prop["description"] = purpose
    properties: dict = {argument: prop}
    if family is WEATHER and rng.random() < 0.2:
        properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    function: dict = {"name": name}
    if purpose := rng.choice(family.purposes):
        function["description"] = purpose
    function["parameters"] = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        function["parameters"]["required"] = [argument]
    return Tool(family, name, argument, {"type": "function", "function": function})


def result_of(rng: Random, tool: Tool, city: str) -> tuple[str, str]:
    """What the tool returns, and the answer to the user."""
    if tool.family is WEATHER:
        degrees, sky = rng.randint(-9, 39), rng.choice(SKIES)
        data: dict = {rng.choice(("temperature", "temperature", "temp", "temperature_c")): degrees, rng.choice(("sky", "sky", "condition", "conditions", "weather")): sky}
        answer = f"It is {degrees} degrees and {sky} in {city}."
        if rng.random() < 0.15:
            return rng.choice((f"{degrees} degrees, {sky}", f"{sky}, {degrees}°C", f"{sky}, {degrees} degrees")), answer
    elif tool.family is TIME:
        clock = f"{rng.randint(0, 23):02d}:{rng.choice((0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55)):02d}"
        data, answer = {"time": clock}, f"It is {clock} in {city}."
        if rng.random() < 0.2:
            return clock, answer
    else:
        number = rng.randint(0, 999)
        data, answer = {"result": number}, f"The result is {number}."
        if rng.random() < 0.3:
            return str(number), answer
        return json.dumps(data), answer
    if rng.random() < 0.3:
        data = {tool.argument: city, **data}
    return json.dumps(data), answer


def subject_of(rng: Random, family: Family) -> str:
    if family is CALCULATE:
        return f"{rng.randint(2, 99)} {rng.choice('+-*/')} {rng.randint(2, 99)}"
    return rng.choice(CITIES)


def tool_use(rng: Random, evaluation: bool) -> Example:
    """A call, an answer from a result, or an ordinary answer. Held out: tool name, argument name and subject together."""
    while True:
        families = [rng.choice(FAMILIES)]
        families += [f for f in rng.sample((WEATHER, TIME, CALCULATE), 2) if f is not families[0]][: rng.choice((0, 0, 1, 2))]
        tool, *others = (draw_tool(rng, family) for family in families)
        subject = subject_of(rng, tool.family)
        key = f"tool:{tool.name}({tool.argument}={subject})"
        if held_out(key) == evaluation:
            break
    offered = [tool.spec, *(other.spec for other in others)]
    rng.shuffle(offered)
    system = some_system(rng)
    asked = Message("user", rng.choice(tool.family.questions).format(subject))
    goal = 0.0 if evaluation and rng.random() < 0.6 else rng.random()
    if goal < 0.5:
        name, arguments = tool.call(subject)
        choice: str | dict = "auto"
        roll = rng.random()
        if roll < 0.12:
            choice = "required"
        elif roll < 0.25:
            choice = {"type": "function", "function": {"name": name}}
        before = [] if rng.random() < 0.8 else plain_exchange(rng)
        return conversation(rng, "tool", [*before, asked], "", call=(name, arguments), thought=tool.family.thought.format(subject), system=system, key=key, tools=offered,
                            choice=choice)
    result, answer = result_of(rng, tool, subject)
    turns = [asked, Message("assistant", "", (tool.call(subject),)), Message("tool", result)]
    if goal < 0.8 or evaluation:
        return conversation(rng, "tool", turns, answer, thought="The tool has answered.", system=system, key=key, tools=offered)
    before = [*turns, Message("assistant", answer)] if goal > 0.95 else []
    question, answer, thought, order = fact(rng)
    while order or (CALCULATE in families and any(c.isdigit() for c in question)):
        question, answer, thought, order = fact(rng)
    return conversation(rng, "tool", [*before, Message("user", question)], answer, thought=thought, system=system, key=key, tools=offered)


def plain_exchange(rng: Random) -> list[Message]:
    """A question before, answered without a tool."""
    while True:
        question, answer, _, order = fact(rng)
        if not order:
            return [Message("user", question), Message("assistant", answer)]


NO_TOOLS = ("Call the tool {}.", "Use the tool {}.", "Please call {}.", "Use {} for this.", "Call {} for {}.", "Can you use {}?", "Run {}.")


def without_tools(rng: Random) -> Example:
    """Questions where no tool is on offer, and requests for a tool that is not there."""
    family = rng.choice((WEATHER, TIME))
    city = rng.choice(CITIES)
    if rng.random() < 0.35:
        asked = rng.choice(NO_TOOLS).format(rng.choice(rng.choice(FAMILIES).names), city)
        return conversation(rng, "fact", [Message("user", asked)], "I have no tools.", thought="No tool is on offer.", system=some_system(rng))
    answer = f"I cannot look up the {'weather' if family is WEATHER else 'time'} in {city}."
    before = plain_exchange(rng) if rng.random() < 0.3 else []
    return conversation(rng, "fact", [*before, Message("user", rng.choice(family.questions).format(city))], answer,
                        thought=family.thought.format(city), system=some_system(rng))
