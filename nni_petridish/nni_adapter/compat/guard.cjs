// Closes NNI's manager, which listens on all network interfaces, has no login, and has a setting
// for neither. This file is preloaded into its node process (NODE_OPTIONS=--require). Then
//
// - a server that names no host listens on 127.0.0.1 only;
// - a request needs a Host of this machine, and an Origin, if any, equal to it: pages of other
//   sites reach the manager neither by DNS rebinding nor by a WebSocket;
// - with a token in NNI_PETRIDISH_TOKEN, a request needs the token: as a header, in the query, or
//   in the cookie that a browser gets when it opens an address with the token. Without it only
//   the status, which `nnictl` shows in its lists, and the icon of the page can be read;
// - the tuner and the trials that the manager starts find the token in the addresses of their
//   channels, in their environment, which only their user can read.
"use strict";
const childProcess = require("child_process");
const crypto = require("crypto");
const http = require("http");
const net = require("net");

const token = process.env.NNI_PETRIDISH_TOKEN;
delete process.env.NNI_PETRIDISH_TOKEN;

const THIS_MACHINE = /^(localhost|127\.0\.0\.1|\[::1\])(:\d+)?$/i;
// Browsers ask for the files of NNI's page without a cookie.
const OPEN = /^\/(api\/v1\/nni\/(check-status|version)|manifest\.json|icon\.png|favicon\.ico)$/;
const CHANNELS = ["NNI_TUNER_COMMAND_CHANNEL", "NNI_TRIAL_COMMAND_CHANNEL"];
const GUARDED = ["request", "checkContinue", "checkExpectation", "upgrade", "connect"];

const listen = net.Server.prototype.listen;
net.Server.prototype.listen = function (port, ...rest) {
  const namesPortOnly = typeof port === "number" && typeof rest[0] !== "string";
  return listen.call(this, port, ...(namesPortOnly ? ["127.0.0.1"] : []), ...rest);
};

const emit = http.Server.prototype.emit;
http.Server.prototype.emit = function (event, request, answer, ...rest) {
  if (GUARDED.includes(event)) {
    const problem = refusal(request, event);
    if (problem) {
      refuse(answer, problem);
      return true;
    }
    const [path, given] = withoutToken(request.url);
    if (given !== null && event === "request" && isPage(request)) {
      welcome(request, answer, path);
      return true;
    }
    request.url = path; // NNI logs addresses
  }
  return emit.call(this, event, request, answer, ...rest);
};

const spawn = childProcess.spawn;
childProcess.spawn = function (...given) {
  const options = given.find((part) => part && part.env);
  if (token && options) {
    const urls = CHANNELS.filter((name) => options.env[name]);
    const added = urls.map((name) => [name, `${options.env[name]}?token=${token}`]);
    options.env = { ...options.env, ...Object.fromEntries(added) };
  }
  return spawn.apply(this, given);
};

function refusal(request, event) {
  const host = (request.headers.host || "").toLowerCase();
  if (event === "connect" || !THIS_MACHINE.test(host)) {
    return "This server answers to addresses of its own machine only.";
  }
  const origin = request.headers.origin;
  if (origin !== undefined && origin.toLowerCase() !== `http://${host}`) {
    return "This server does not answer to pages of other sites.";
  }
  if (token && !isOpen(request, event) && !tokens(request).some(isToken)) {
    return "Open the address that nni-petridish run has printed: it has a token.";
  }
  return "";
}

function isOpen(request, event) {
  const [path] = request.url.split("?");
  return event === "request" && request.method === "GET" && OPEN.test(path);
}

function tokens(request) {
  const name = `${cookieName(request)}=`;
  const cookies = (request.headers.cookie || "").split(";").map((cookie) => cookie.trim());
  const kept = cookies.filter((cookie) => cookie.startsWith(name));
  const given = [request.headers["x-petridish-token"], withoutToken(request.url)[1]];
  return [...given, ...kept.map((cookie) => cookie.slice(name.length))];
}

function isToken(text) {
  const digest = (value) => crypto.createHash("sha256").update(value).digest();
  return typeof text === "string" && crypto.timingSafeEqual(digest(text), digest(token));
}

// Returns the address without its token, and the token, null if there is none.
function withoutToken(url) {
  const [path, query] = [url.split("?", 1)[0], url.split("?").slice(1).join("?")];
  const words = query.split("&");
  const given = words.find((word) => word.startsWith("token="));
  const rest = words.filter((word) => word && !word.startsWith("token=")).join("&");
  return [rest ? `${path}?${rest}` : path, given === undefined ? null : given.slice(6)];
}

function isPage(request) {
  return request.method === "GET" && (request.headers.accept || "").includes("text/html");
}

function welcome(request, answer, path) {
  answer.writeHead(303, {
    // A path that begins with two slashes would name another machine.
    Location: path.replace(/^\/*/, "/"),
    "Set-Cookie": `${cookieName(request)}=${token}; Path=/; HttpOnly; SameSite=Lax`,
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
  });
  answer.end();
}

function cookieName(request) {
  // Browsers share cookies between the ports of a machine.
  return `nni_petridish_${request.socket.localPort}`;
}

function refuse(answer, problem) {
  if (answer instanceof http.ServerResponse) {
    answer.writeHead(403, { "Content-Type": "text/plain", Connection: "close" });
    answer.end(`${problem}\n`);
  } else {
    answer.end("HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
  }
}
