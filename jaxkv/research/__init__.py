"""Training of small models, head conversion (MHA to GQA and MQA) and layout studies."""
