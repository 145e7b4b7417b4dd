// Restricts NNI's manager to the loopback address. The manager listens on all network interfaces,
// has no login, and has a setting for neither. This file is preloaded into its node process
// (NODE_OPTIONS=--require): a server that names no host then listens on 127.0.0.1 only.
"use strict";
const net = require("net");
const listen = net.Server.prototype.listen;

net.Server.prototype.listen = function (port, ...rest) {
  const namesPortOnly = typeof port === "number" && typeof rest[0] !== "string";
  return listen.call(this, port, ...(namesPortOnly ? ["127.0.0.1"] : []), ...rest);
};
