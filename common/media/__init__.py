"""What is known of encoded media before they are decoded, and limits on what decodes them."""
