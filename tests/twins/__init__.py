"""Small stand-ins for models, trainers, engines and weight channels, under the real servicers, loops and store."""
