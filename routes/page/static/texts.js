/**
 * Everything that the page says, in English and Chinese, and which of them it says now.
 *
 * An element that shows a text names it (`data-text`, `data-label`, `data-hint`, `data-tip`), so that a change
 * of the language changes what is on the page already.
 */

/**
 * Key -> English, Chinese. `{name}` stands for a value, `{name#answer|answers}` for the first word where the
 * value is 1 and else for the second.
 * @type {Record<string, [string, string]>}
 */
export const TABLE = {
  skip: ["Skip to the content", "跳到正文"],
  views: ["Views", "视图"],
  chat: ["Chat", "对话"],
  batch: ["Batch", "批量"],
  translate: ["Translate", "翻译"],
  figures: ["Figures", "指标"],
  model: ["Model", "模型"],
  language: ["中文", "English"],
  languageLabel: ["Switch to Chinese", "切换到英文"],
  themeAuto: ["Theme: as the system", "主题：跟随系统"],
  themeLight: ["Theme: light", "主题：浅色"],
  themeDark: ["Theme: dark", "主题：深色"],
  cancel: ["Cancel", "取消"],
  close: ["Close", "关闭"],
  copy: ["Copy", "复制"],
  copied: ["Copied", "已复制"],
  copyCode: ["Copy the code", "复制代码"],
  notCopied: ["The browser does not allow this page to copy.", "浏览器不允许此页面复制。"],

  unreachable: ["The server cannot be reached. Trying again …", "无法连接服务器，正在重试……"],
  notReady: ["The server is not ready yet. Waiting for it …", "服务器尚未就绪，正在等待……"],
  back: ["The server is back.", "服务器已恢复。"],
  noConnection: ["The server cannot be reached.", "无法连接服务器。"],
  strange: ["The server answered with status {status}.", "服务器返回状态 {status}。"],

  passwordTitle: ["This server asks for a password", "此服务器需要密码"],
  password: ["Password", "密码"],
  passwordWrong: ["That password is not the right one.", "密码不正确。"],
  passwordKept: ["It is kept until this tab is closed.", "密码只保存到此标签页关闭为止。"],
  passwordAscii: ["A password has ASCII characters only.", "密码只能包含 ASCII 字符。"],
  passwordMissing: ["The server asks for a password.", "服务器需要密码。"],
  enter: ["Continue", "继续"],

  sessions: ["Sessions", "会话"],
  newChat: ["New chat", "新对话"],
  findSession: ["Find a session", "查找会话"],
  noSessions: ["None yet. A chat is kept by the server.", "暂无。对话保存在服务器上。"],
  noneFound: ["No session has this in its name.", "没有名称匹配的会话。"],
  moreSessions: ["Show more", "显示更多"],
  tokensOf: ["{count} {count#token|tokens}", "{count} 个词元"],
  import: ["Import", "导入"],
  export: ["Export the session", "导出会话"],
  fork: ["Fork", "创建分支"],
  rename: ["Rename", "重命名"],
  save: ["Save as Markdown", "保存为 Markdown"],
  sessionMenu: ["What to do with this chat", "此对话的操作"],
  name: ["Name", "名称"],
  renameTitle: ["Rename this chat", "重命名此对话"],
  renameText: ["Its versions are renamed with it.", "它的各个版本会一起重命名。"],
  renamed: ["Renamed to “{name}”.", "已重命名为“{name}”。"],
  otherClients: ["From other clients", "来自其他客户端"],
  remove: ["Delete", "删除"],
  forkTitle: ["Fork this session", "创建会话分支"],
  forkText: [
    "A copy that goes its own way. Nothing is computed again.",
    "一份独立发展的副本，无需重新计算。",
  ],
  forkName: ["Name of the copy", "副本名称"],
  deleteTitle: ["Delete this session?", "删除此会话？"],
  deleteText: ["“{name}” is gone for good then, with all its versions.", "“{name}”及其所有版本将被永久删除。"],
  rewindTitle: ["Rewind to before this message?", "回退到此消息之前？"],
  rewindText: [
    "The session forgets this message and what came after it. The message returns to the box below.",
    "会话将忘记此消息及其后的内容。消息会放回下方输入框。",
  ],
  rewind: ["Rewind", "回退"],
  rewindHere: ["Rewind to before this message", "回退到此消息之前"],
  forkHere: ["Fork after this answer", "在此回答之后创建分支"],
  importTitle: ["Import a session", "导入会话"],
  importText: ["A session of this name is replaced.", "同名会话将被替换。"],
  importName: ["Name of the session", "会话名称"],
  done: ["Done.", "完成。"],
  forked: ["Forked to “{name}”.", "已创建分支“{name}”。"],
  deleted: ["Deleted.", "已删除。"],
  rewound: ["Rewound.", "已回退。"],
  imported: ["Imported as “{name}”.", "已导入为“{name}”。"],
  showSessions: ["Show sessions", "显示会话"],

  hello: ["What would you like to ask?", "想问点什么？"],
  helloText: [
    "The server keeps the conversation as a state of constant size, so only what is new is sent.",
    "服务器以固定大小的状态保存对话，因此每次只发送新的内容。",
  ],
  try1: ["What is the capital of France?", "法国的首都是什么？"],
  try2: ["Translate to French: The red car is fast.", "翻译成法语：红色的车很快。"],
  try3: ["Tell me a story about a fox", "27 + 35 等于多少？"],
  conversation: ["Conversation", "对话内容"],
  message: ["Message", "消息"],
  messageHint: ["Write a message", "输入消息"],
  keys: [
    "Enter sends, Shift+Enter makes a new line, Escape stops.",
    "Enter 发送，Shift+Enter 换行，Esc 停止。",
  ],
  send: ["Send", "发送"],
  stop: ["Stop", "停止"],
  think: ["Think", "思考"],
  thinking: ["Thinking …", "正在思考……"],
  thought: ["Thought", "思考过程"],
  options: ["Options", "选项"],
  system: ["System prompt of a new chat", "新对话的系统提示"],
  changedOptions: ["Options ({count})", "选项（{count}）"],
  optionsStay: ["They stay in this browser.", "保存在此浏览器中。"],
  useDefaults: ["Use the defaults", "恢复默认"],
  startState: ["Start state of a new chat", "新对话的初始状态"],
  adapter: ["Adapter of a new chat", "新对话的适配器"],
  none: ["none", "无"],
  topK: ["Top k", "Top k"],
  presence: ["Presence penalty", "存在惩罚"],
  frequency: ["Frequency penalty", "频率惩罚"],
  decay: ["Penalty decay", "惩罚衰减"],
  seed: ["Seed", "随机种子"],
  atRandom: ["random", "随机"],
  stops: ["Stop at these texts, one per line", "遇到这些文本时停止，每行一个"],
  noStops: ["none", "无"],
  temperature: ["Temperature", "温度"],
  topP: ["Top p", "Top p"],
  maxTokens: ["Max tokens", "最多词元"],
  byServer: ["default", "默认"],
  attach: ["Attach text files", "添加文本文件"],
  attached: ["Attached texts", "已添加的文本"],
  removeFile: ["Remove this text", "移除此文本"],
  pastedText: ["Pasted text", "粘贴的文本"],
  characters: ["{count} {count#character|characters}", "{count} 个字符"],
  fileTooLarge: ["{name} has more than 1 MiB.", "{name} 超过 1 MiB。"],
  fileNoText: ["{name} is no text in UTF-8.", "{name} 不是 UTF-8 文本。"],
  again: ["Answer again", "重新回答"],
  edit: ["Edit this message", "编辑此消息"],
  editMessage: ["Message", "消息"],
  sendAgain: ["Send", "发送"],
  versions: ["Versions", "版本"],
  versionOf: ["Version {at} of {count}", "第 {at} 个版本，共 {count} 个"],
  olderVersion: ["Older version", "较早的版本"],
  newerVersion: ["Newer version", "较新的版本"],
  you: ["You", "你"],
  assistant: ["Answer", "回答"],
  prompt: ["Prompt", "提示"],
  systemMessage: ["System prompt", "系统提示"],
  toolMessage: ["Result of a tool", "工具结果"],
  answering: ["Answering …", "正在回答……"],
  answered: ["Answer: {text}", "回答：{text}"],
  toEnd: ["Jump to the end", "跳到末尾"],
  cut: ["Reached the token limit", "已达词元上限"],
  stopped: ["Stopped", "已停止"],
  broken: ["Interrupted. The session does not have this turn.", "已中断。会话未保存此轮。"],
  speed: ["{count} {count#token|tokens} · {speed} per second", "{count} 个词元 · 每秒 {speed}"],

  batchLead: [
    "One prompt, many rows at once, each drawn on its own.",
    "一个提示，同时生成多行，每行独立采样。",
  ],
  rows: ["Rows", "行数"],
  form: ["Prompt is", "提示类型"],
  formChat: ["a question", "提问"],
  formRaw: ["raw text", "续写文本"],
  run: ["Run", "运行"],
  batchHint: ["What is the opposite of cold?", "“冷”的反义词是什么？"],
  rowsGrid: ["Rows of the batch", "批量结果"],
  progress: [
    "{done} of {rows} finished · {different} distinct {different#answer|answers} · about {tokens} {tokens#token|tokens}",
    "已完成 {done}/{rows} · {different} 种不同结果 · 约 {tokens} 个词元",
  ],
  batchDone: [
    "{rows} {rows#row|rows} finished in {seconds} s · {different} distinct {different#answer|answers} · {tokens} {tokens#token|tokens} · {speed} tokens per second",
    "{rows} 行用时 {seconds} 秒 · {different} 种不同结果 · {tokens} 个词元 · 每秒 {speed} 个词元",
  ],
  batchStopped: [
    "Stopped after about {tokens} {tokens#token|tokens} in {rows} {rows#row|rows}.",
    "已停止：{rows} 行，约 {tokens} 个词元。",
  ],
  row: ["Row {number}", "第 {number} 行"],
  waiting: ["waiting", "等待中"],
  running: ["running", "生成中"],
  end_stop: ["finished", "已完成"],
  end_length: ["reached the limit", "已达上限"],
  end_error: ["failed", "出错"],
  showAll: ["Show all", "展开"],
  showLess: ["Show less", "收起"],

  translateLead: ["Each line is translated on its own, all in one batch.", "逐行翻译，一次批量完成。"],
  from: ["From", "源语言"],
  to: ["To", "目标语言"],
  auto: ["Detect language", "自动检测"],
  source: ["Text", "原文"],
  result: ["Translation", "译文"],
  sourceHint: ["Text to translate", "要翻译的文本"],
  swap: ["Swap the languages", "交换语言"],
  translating: ["Translating …", "正在翻译……"],
  translated: ["Translated {count} {count#line|lines}.", "已翻译 {count} 行。"],

  figuresLead: ["What the server does right now, from /stats.", "服务器当前状态，来自 /stats。"],
  pulse: ["{speed} tokens/s · {running} running", "{speed} 词元/秒 · {running} 行运行中"],
  pulseBegun: ["{running} running", "{running} 行运行中"],
  speedNow: ["Tokens per second", "每秒词元"],
  runningRows: ["Rows running", "运行中的行"],
  ofRows: ["of {count}", "共 {count}"],
  waitingRows: ["Rows waiting", "等待中的行"],
  madeTokens: ["Tokens generated", "生成的词元"],
  readTokens: ["Prompt tokens read", "读入的提示词元"],
  requests: ["Rows accepted", "已接收的行"],
  batchSize: ["Rows per step", "每步行数"],
  idle: ["Device idle", "设备空闲"],
  states: ["Sessions by tier", "各级会话"],
  onDevice: ["On the device", "设备内存"],
  inMemory: ["In memory", "主机内存"],
  onDisk: ["On disk", "磁盘"],
  device: ["Device", "设备"],
  version: ["Version", "版本"],
  lastMinute: ["Tokens per second, the last two minutes", "最近两分钟的每秒词元"],
  metricsTitle: ["These figures have a password of their own", "指标使用单独的密码"],
};

const LANGUAGES = ["en", "zh"];
let column = 0;

/** Which language the page speaks: "en" or "zh". */
export function language() {
  return LANGUAGES[column];
}

/** @param {string} name "en" or "zh" */
export function setLanguage(name) {
  column = Math.max(LANGUAGES.indexOf(name), 0);
  document.documentElement.lang = column ? "zh-Hans" : "en";
  localize(document.body);
}

/**
 * A text of the table with its values.
 * @param {string} key
 * @param {Record<string, string | number>} [values]
 */
export function text(key, values = {}) {
  return TABLE[key][column].replace(/\{(\w+)(?:#(.*?)\|(.*?))?\}/g, (whole, name, one, more) =>
    one === undefined ? String(values[name] ?? whole) : String(values[name]) === "1" ? one : more,
  );
}

/** A number in the form of the language. */
export function number(value, digits = 0) {
  return value.toLocaleString(language(), { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

/**
 * Show a text in an element, also after the language has changed.
 * @param {Element} element
 * @param {string} key
 * @param {Record<string, string | number>} [values]
 */
export function say(element, key, values = {}) {
  element.dataset.text = key;
  element.dataset.values = JSON.stringify(values);
  element.textContent = text(key, values);
}

/** Show the texts that the elements below `root` name. */
export function localize(root) {
  for (const element of root.querySelectorAll("[data-text]")) {
    element.textContent = text(element.dataset.text, JSON.parse(element.dataset.values || "{}"));
  }
  for (const element of root.querySelectorAll("[data-label]")) {
    element.setAttribute("aria-label", text(element.dataset.label));
  }
  for (const element of root.querySelectorAll("[data-hint]")) {
    element.setAttribute("placeholder", text(element.dataset.hint));
  }
  for (const element of root.querySelectorAll("[data-tip]")) {
    element.setAttribute("title", text(element.dataset.tip));
  }
}
