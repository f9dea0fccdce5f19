"""The commands: parse, call one function, print. Heavy imports wait until a command needs them."""
