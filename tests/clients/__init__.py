DEFAULT = "SmolLM2-135M-Instruct"
