from echo2.cli import main

main()
