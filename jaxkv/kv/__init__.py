"""The paged KV state: who owns which page (pages), the arrays (state), and how they are written and read (store)."""
