"""The two models' updates: advantages, normalisation, and begin / train_chunk / finish / abort for each."""
