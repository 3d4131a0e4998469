"""K3's chat protocol and the chat-completions wire in each vendor's dialect."""
