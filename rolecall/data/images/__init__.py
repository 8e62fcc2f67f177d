"""Images in prompts: their files, and the tokens that stand for them. No torch; Pillow where an image is opened."""
