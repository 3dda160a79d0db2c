"""HTTP: JSON in, text and server-sent events out. Nothing here touches the model or imports torch."""
