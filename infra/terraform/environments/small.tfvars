# The least that works: to try, not to sell with. Its cost is in docs/how-to/cluster.md.
region       = "eu-central-1"
environment  = "small"
admins       = ["arn:aws:iam::000000000000:role/platform"]
api_cidrs    = ["203.0.113.7/32"] # yours: without it kubectl reaches the API from the VPC alone
zones        = 2
nat_per_zone = false
nodes        = { type = "t3.large", min = 2, max = 4 }
valkey       = { type = "cache.t4g.micro", shards = 1, replicas = 0 }
database     = { type = "db.t4g.micro", gib = 20, standby = false }
