"""`mesh top`: the mesh in one terminal. `answers` is what the daemon says, `view` what is shown of it, `app` draws."""
